"""Read a pickle without running it.

A pickle is a program for a stack machine. The machine here supports the operations that `pickle.dump` and torch's C++
pickler write since protocol 2. It never imports a name. A call or a built object becomes a record of the call, and the
caller builds its own objects from the records. Each operation takes time and memory in proportion to its own length.
A shared value is stored once, so a caller that walks through all references counts them against `num_operations`.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

MAX_BYTES = 128 * 2**20
# Torch's operations have at least two bytes. An operation that opens a list has one byte and takes 64 bytes of memory.
MAX_OPERATIONS = MAX_BYTES // 2
MAX_PLAIN_BYTES = 32 * 2**20
MAX_PLAIN_OPERATIONS = 4_000_000
MAX_PLAIN_VALUES = MAX_PLAIN_OPERATIONS  # counted at each reference
MAX_PLAIN_BITS = 128  # of an integer
CHARACTERS_PER_VALUE = 16  # of a text, in the count of values


class RefusedPickleError(ValueError):
    """A pickle that is damaged, too large, or has content that is not allowed."""


class GlobalName(NamedTuple):
    """A class or function as the pickle names it."""

    module: str
    name: str


class PickledObject:
    """A call that the pickle describes, and the state it sets on the result."""

    __slots__ = ("arguments", "state", "target")

    def __init__(self, target: GlobalName, arguments: tuple[Any, ...]) -> None:
        self.target, self.arguments, self.state = target, arguments, None


class PickledDict(list[tuple[Any, Any]]):
    """The items of a dict. Keys are not hashed, because hashing nested shared tuples takes exponential time."""


class PickleContent(NamedTuple):
    """A value of None, bool, int, float, str, bytes, tuple, list, PickledDict, GlobalName, and PickledObject."""

    value: Any
    num_operations: int


def read_pickle(
    data: bytes, allowed_names: frozenset[GlobalName], max_bytes: int = 0, max_operations: int = 0
) -> PickleContent:
    """Return the content of a pickle. The limits default to MAX_BYTES and MAX_OPERATIONS.

    Raises:
        RefusedPickleError: the pickle is damaged, too large, or uses a name outside `allowed_names`.
    """
    max_bytes = max_bytes or MAX_BYTES
    if len(data) > max_bytes:
        raise RefusedPickleError(f"the pickle has more than {max_bytes:,} bytes")
    machine = _Machine(data, allowed_names)
    try:
        return machine.run(max_operations or MAX_OPERATIONS)
    except LookupError:  # the data, the stack, the marks, or the memo ended
        raise RefusedPickleError(f"damaged at byte {machine.position}") from None
    except UnicodeDecodeError:
        raise RefusedPickleError(f"damaged at byte {machine.position}: a text is not UTF-8") from None


def read_plain_pickle(data: bytes) -> Any:
    """Return the lists, dicts, tuples, texts, bytes, and numbers of a pickle.

    Raises:
        RefusedPickleError: the pickle is damaged, too large, or has other content.
    """
    return _to_builtin(read_pickle(data, frozenset(), MAX_PLAIN_BYTES, MAX_PLAIN_OPERATIONS).value)


class _Machine:
    def __init__(self, data: bytes, allowed_names: frozenset[GlobalName]) -> None:
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._data, self._allowed_names = data, allowed_names
        self._outer_stacks: list[list[Any]] = []  # one per open mark

    def run(self, max_operations: int) -> PickleContent:
        data, operations = self._data, OPERATIONS if self._allowed_names else PLAIN_OPERATIONS
        for count in range(max_operations):
            code = data[self.position]
            self.position += 1
            if code == STOP:
                return PickleContent(self._pop_result(), count)
            operation = operations.get(code)
            if operation is None:
                raise RefusedPickleError(
                    f"byte {self.position - 1} is the opcode {_get_opcode_name(code)}, which is not allowed"
                )
            operation(self)
        raise RefusedPickleError(f"the pickle has more than {max_operations:,} operations")

    def _pop_result(self) -> Any:
        if self._outer_stacks or len(self.stack) != 1 or self.position != len(self._data):
            raise RefusedPickleError(f"damaged: the pickle ends at byte {self.position} of {len(self._data):,}")
        return self.stack.pop()

    def read_number(self, num_bytes: int) -> int:
        return int.from_bytes(self.read(num_bytes), "little")

    def read_signed(self, num_bytes: int) -> int:
        return int.from_bytes(self.read(num_bytes), "little", signed=True)

    def read_float(self) -> float:
        (number,) = struct.unpack(">d", self.read(8))
        return float(number)

    def read(self, num_bytes: int) -> bytes:
        begin = self.position
        self.position = begin + num_bytes
        if self.position > len(self._data):
            raise RefusedPickleError(f"damaged: {num_bytes:,} bytes after byte {begin} are missing")
        return self._data[begin : self.position]

    def read_text(self, num_bytes: int) -> str:
        return self.read(num_bytes).decode("utf-8", "surrogatepass")  # as pickle does

    def skip_frame(self) -> None:
        self.read(8)  # a length, for readers of streams

    def check_protocol(self) -> None:
        number = self.read_number(1)
        if not 2 <= number <= 5:
            raise RefusedPickleError(f"protocol {number}, expected 2 to 5")

    def memoize(self, index: int | None = None) -> None:
        index = len(self.memo) if index is None else index
        if index > len(self.memo):  # writers number values in order
            raise RefusedPickleError(f"damaged at byte {self.position}: memo index {index} is out of order")
        self.memo[index] = self.stack[-1]

    def peek(self, kind: type[Any]) -> Any:
        """Return the top of the stack if it has this exact type."""
        top = self.stack[-1]
        if type(top) is not kind:
            raise RefusedPickleError(f"damaged at byte {self.position}: unexpected {type(top).__name__}")
        return top

    def pop(self, kind: type[Any]) -> Any:
        self.peek(kind)
        return self.stack.pop()

    def mark(self) -> None:
        self._outer_stacks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        values, self.stack = self.stack, self._outer_stacks.pop()
        return values

    def make_tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise IndexError
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def push_name(self) -> None:
        name = self.pop(str)
        full_name = GlobalName(self.pop(str), name)
        if full_name not in self._allowed_names:
            raise RefusedPickleError(f"{full_name.module[:100]}.{full_name.name[:100]} is not allowed")
        self.stack.append(full_name)

    def call(self) -> None:
        arguments = self.pop(tuple)
        self.stack.append(PickledObject(self.pop(GlobalName), arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.peek(PickledObject)
        if target.state is not None:
            raise RefusedPickleError(f"damaged at byte {self.position}: a state is set twice")
        target.state = state

    def append(self, values: list[Any]) -> None:
        self.peek(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise IndexError
        self.peek(PickledDict).extend(zip(values[::2], values[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])


def _push(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def push(m: _Machine) -> None:
        value = read(m)  # first, because reading a tuple up to a mark replaces the stack
        m.stack.append(value)

    return push


def _get_opcode_name(code: int) -> str:
    return next((opcode.name for opcode in pickletools.opcodes if ord(opcode.code) == code), f"{code:#04x}")


STOP = ord(".")
# By opcode, in the order of `pickletools`.
PLAIN_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.check_protocol,  # PROTO
    0x95: _Machine.skip_frame,  # FRAME
    0x94: _Machine.memoize,  # MEMOIZE
    ord("q"): lambda m: m.memoize(m.read_number(1)),  # BINPUT
    ord("r"): lambda m: m.memoize(m.read_number(4)),  # LONG_BINPUT
    ord("h"): _push(lambda m: m.memo[m.read_number(1)]),  # BINGET
    ord("j"): _push(lambda m: m.memo[m.read_number(4)]),  # LONG_BINGET
    ord("("): _Machine.mark,  # MARK
    ord("N"): _push(lambda m: None),  # NONE
    0x88: _push(lambda m: True),  # NEWTRUE
    0x89: _push(lambda m: False),  # NEWFALSE
    ord("K"): _push(lambda m: m.read_number(1)),  # BININT1
    ord("M"): _push(lambda m: m.read_number(2)),  # BININT2
    ord("J"): _push(lambda m: m.read_signed(4)),  # BININT
    0x8A: _push(lambda m: m.read_signed(m.read_number(1))),  # LONG1
    0x8B: _push(lambda m: m.read_signed(m.read_number(4))),  # LONG4
    ord("G"): _push(_Machine.read_float),  # BINFLOAT
    0x8C: _push(lambda m: m.read_text(m.read_number(1))),  # SHORT_BINUNICODE
    ord("X"): _push(lambda m: m.read_text(m.read_number(4))),  # BINUNICODE
    ord("C"): _push(lambda m: m.read(m.read_number(1))),  # SHORT_BINBYTES
    ord("B"): _push(lambda m: m.read(m.read_number(4))),  # BINBYTES
    ord(")"): _push(lambda m: ()),  # EMPTY_TUPLE
    0x85: lambda m: m.make_tuple(1),  # TUPLE1
    0x86: lambda m: m.make_tuple(2),  # TUPLE2
    0x87: lambda m: m.make_tuple(3),  # TUPLE3
    ord("t"): _push(lambda m: tuple(m.pop_to_mark())),  # TUPLE
    ord("]"): _push(lambda m: []),  # EMPTY_LIST
    ord("a"): lambda m: m.append([m.stack.pop()]),  # APPEND
    ord("e"): lambda m: m.append(m.pop_to_mark()),  # APPENDS
    ord("}"): _push(lambda m: PickledDict()),  # EMPTY_DICT
    ord("s"): _Machine.set_item,  # SETITEM
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),  # SETITEMS
}
OPERATIONS = PLAIN_OPERATIONS | {
    0x93: _Machine.push_name,  # STACK_GLOBAL
    0x81: _Machine.call,  # NEWOBJ
    ord("R"): _Machine.call,  # REDUCE
    ord("b"): _Machine.build,  # BUILD
}


def _to_builtin(root: Any) -> Any:
    """Return the value with each PickledDict replaced by a dict.

    A shared value is small in the pickle and in memory, and can be huge when it is written out, so each reference to a
    value counts toward MAX_PLAIN_VALUES.
    """
    converted: dict[int, tuple[Any, int]] = {}  # by id: the value, and its number of values
    open_ids: set[int] = set()
    stack = [root]
    while stack:
        value = stack[-1]
        if id(value) in converted:
            stack.pop()
        elif not isinstance(value, list | tuple):
            converted[id(value)] = value, _count_values(value)
        elif id(value) in open_ids:
            open_ids.remove(id(value))
            converted[id(value)] = _convert_container(value, converted)
        else:
            open_ids.add(id(value))
            inner = [one for one in _iterate(value) if id(one) not in converted]
            if any(id(one) in open_ids for one in inner):
                raise RefusedPickleError("a list or dict contains itself")
            stack += inner
    return converted[id(root)][0]


def _convert_container(value: list[Any] | tuple[Any, ...], converted: dict[int, tuple[Any, int]]) -> tuple[Any, int]:
    num_values = 1 + sum(converted[id(one)][1] for one in _iterate(value))
    if num_values > MAX_PLAIN_VALUES:
        raise RefusedPickleError(f"the pickle has more than {MAX_PLAIN_VALUES:,} values, counted at each reference")
    if not isinstance(value, PickledDict):
        return type(value)(converted[id(one)][0] for one in value), num_values
    if any(isinstance(key, list | tuple) for key, _ in value):
        raise RefusedPickleError("damaged: a dict has a list or tuple as a key")
    return {key: converted[id(one)][0] for key, one in value}, num_values


def _iterate(value: list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return chain.from_iterable(value) if isinstance(value, PickledDict) else value


def _count_values(scalar: Any) -> int:
    if isinstance(scalar, int) and scalar.bit_length() > MAX_PLAIN_BITS:
        raise RefusedPickleError(f"the pickle has a number of {scalar.bit_length():,} bits, more than {MAX_PLAIN_BITS}")
    return 1 + len(scalar) // CHARACTERS_PER_VALUE if isinstance(scalar, str | bytes) else 1
