"""Reads what a pickle describes, and runs none of it.

A pickle is a program for a small machine of its own. This one knows the operations that `pickle.dump` writes since
protocol 4. What a pickle names it looks up nowhere, and what it calls or builds becomes a record of that: whoever reads
one makes of the records what he knows. Each operation takes time and memory of its own length, so a pickle costs what
its size says; what it points at many times is there once, and whoever walks through counts (`operations`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BYTES = 128 * 2**20
MOST_OPERATIONS = MOST_BYTES // 2  # torch's have two bytes and more; one that only opens lists takes 64 bytes for each


class RefusedPickleError(ValueError):
    """It is broken, or holds what nobody admits; says what."""


class Name(NamedTuple):
    """Of a class or function, as the pickle writes it."""

    module: str
    name: str


class Made:
    """What a pickle would have called `of` for, and set the state of."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Name, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments, self.state = of, arguments, None


class Pairs(list[tuple[Any, Any]]):
    """A dict, whose keys nobody has hashed: a tuple can point at one that points at one, and so on for ever."""


class Read(NamedTuple):
    """`value` is of None, bool, int, str, tuple, list, `Pairs`, `Name` and `Made`."""

    value: Any
    operations: int


def read(data: bytes, admitted: frozenset[Name]) -> Read:
    """
    Raises:
        RefusedPickleError: it is broken, too large, or names something else than `admitted`.
    """
    if len(data) > MOST_BYTES:
        raise RefusedPickleError(f"more than {MOST_BYTES:,} bytes")
    machine = _Machine(data, admitted)
    try:
        return machine.run()
    except IndexError:  # of the data, the stack, the marks or the memo
        raise RefusedPickleError(f"damaged at byte {machine.at}") from None
    except UnicodeDecodeError:
        raise RefusedPickleError(f"damaged at byte {machine.at}: a text is not UTF-8") from None


class _Machine:
    def __init__(self, data: bytes, admitted: frozenset[Name]) -> None:
        self.at = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self._data, self._admitted = data, admitted
        self._below: list[list[Any]] = []  # the stacks under the marks

    def run(self) -> Read:
        data = self._data
        for count in range(MOST_OPERATIONS):
            code = data[self.at]
            self.at += 1
            if code == STOP:
                return Read(self._end(), count)
            work = OPERATIONS.get(code)
            if work is None:
                raise RefusedPickleError(f"byte {self.at - 1} is {code:#04x}, an operation that is not allowed")
            work(self)
        raise RefusedPickleError(f"more than {MOST_OPERATIONS:,} operations")

    def _end(self) -> Any:
        if self._below or len(self.stack) != 1 or self.at != len(self._data):
            raise RefusedPickleError(f"damaged: the pickle ends at byte {self.at} of {len(self._data):,}")
        return self.stack.pop()

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def take(self, size: int) -> bytes:
        begin = self.at
        self.at = begin + size
        if self.at > len(self._data):
            raise RefusedPickleError(f"damaged: {size:,} bytes after byte {begin} are missing")
        return self._data[begin : self.at]

    def top(self, kind: type[Any]) -> Any:
        """What is built on, where it is of that kind."""
        found = self.stack[-1]
        if type(found) is not kind:
            raise self.wrong(found)
        return found

    def pop(self, kind: type[Any]) -> Any:
        found = self.top(kind)
        self.stack.pop()
        return found

    def mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """What was pushed since the mark."""
        found, self.stack = self.stack, self._below.pop()
        return found

    def fold(self, size: int) -> None:
        if len(self.stack) < size:
            raise IndexError
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def name(self) -> None:
        name = self.pop(str)
        found = Name(self.pop(str), name)
        if found not in self._admitted:
            raise RefusedPickleError(f"{found.module[:100]}.{found.name[:100]} is not allowed")
        self.stack.append(found)

    def call(self) -> None:
        arguments = self.pop(tuple)
        self.stack.append(Made(self.pop(Name), arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.top(Made)
        if made.state is not None:
            raise RefusedPickleError(f"damaged at byte {self.at}: a state is set twice")
        made.state = state

    def pair(self, given: list[Any]) -> None:
        if len(given) % 2:
            raise IndexError
        self.top(Pairs).extend(zip(given[::2], given[1::2], strict=True))

    def wrong(self, found: Any) -> RefusedPickleError:
        return RefusedPickleError(f"damaged at byte {self.at}: unexpected {type(found).__name__}")


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def push(m: _Machine) -> None:
        found = value(m)  # first: a tuple's is what lies over a mark, and ends that stack
        m.stack.append(found)

    return push


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.top(Pairs).append((key, value))


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    m.top(list).append(value)


STOP = ord(".")
# By their bytes, with the names that `pickletools` gives them.
OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: _protocol(m.number(1)),
    0x95: lambda m: _nothing(m.take(8)),  # FRAME: its length is for who reads from a file
    0x94: lambda m: m.memo.append(m.stack[-1]),  # MEMOIZE
    ord("h"): _push(lambda m: m.memo[m.number(1)]),  # BINGET
    ord("j"): _push(lambda m: m.memo[m.number(4)]),  # LONG_BINGET
    0x93: _Machine.name,  # STACK_GLOBAL
    0x81: _Machine.call,  # NEWOBJ
    ord("R"): _Machine.call,  # REDUCE
    ord("b"): _Machine.build,  # BUILD
    ord("("): _Machine.mark,  # MARK
    ord("N"): _push(lambda m: None),  # NONE
    0x88: _push(lambda m: True),  # NEWTRUE
    0x89: _push(lambda m: False),  # NEWFALSE
    ord("K"): _push(lambda m: m.number(1)),  # BININT1
    ord("M"): _push(lambda m: m.number(2)),  # BININT2
    ord("J"): _push(lambda m: int.from_bytes(m.take(4), "little", signed=True)),  # BININT
    0x8A: _push(lambda m: int.from_bytes(m.take(m.number(1)), "little", signed=True)),  # LONG1: at most 255 bytes
    0x8C: _push(lambda m: m.take(m.number(1)).decode()),  # SHORT_BINUNICODE
    ord("X"): _push(lambda m: m.take(m.number(4)).decode()),  # BINUNICODE
    ord(")"): _push(lambda m: ()),  # EMPTY_TUPLE
    0x85: lambda m: m.fold(1),  # TUPLE1
    0x86: lambda m: m.fold(2),  # TUPLE2
    0x87: lambda m: m.fold(3),  # TUPLE3
    ord("t"): _push(lambda m: tuple(m.marked())),  # TUPLE
    ord("]"): _push(lambda m: []),  # EMPTY_LIST
    ord("a"): _append,  # APPEND
    ord("e"): lambda m: _extend(m, m.marked()),  # APPENDS
    ord("}"): _push(lambda m: Pairs()),  # EMPTY_DICT
    ord("s"): _set_item,  # SETITEM
    ord("u"): lambda m: m.pair(m.marked()),  # SETITEMS
}


def _nothing(_: bytes) -> None:
    pass


def _protocol(number: int) -> None:
    if number not in (4, 5):
        raise RefusedPickleError(f"protocol {number}, expected 4 or 5")


def _extend(m: _Machine, given: list[Any]) -> None:
    m.top(list).extend(given)
