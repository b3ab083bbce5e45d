"""Reads a pickle that holds builtin containers and scalars, and refuses every other before anything of it runs.

A pickle is a program. Two fences: its opcodes are read first, without obeying them, and one that could name or call
something is refused, as is what would ask for much memory; then the machine that obeys them knows no names.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterable
from itertools import chain
from typing import Any, NoReturn

MOST_BYTES = 32 * 2**20
MOST_OPS = 4_000_000
MOST_VALUES = MOST_OPS  # each as often as something points at it: whoever walks through meets it as often
LETTERS_A_VALUE = 16
MOST_BITS = 128
PLAIN = """PROTO STOP FRAME MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4
FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINBYTES
SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT
SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET"""
ALLOWED = frozenset(PLAIN.split())
REMEMBERS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


class RefusedPickleError(ValueError):
    """It holds what no dump of plain data holds."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedPickleError(
            f"The pickle contains a {module}.{name}. Only lists, dicts, tuples, texts, and numbers are supported."
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError("The pickle refers to data outside the file.")


def load(data: bytes) -> Any:
    """What a pickle of plain data holds.

    Raises:
        RefusedPickleError: it is too large, broken, or more than plain data.
    """
    if len(data) > MOST_BYTES:
        raise RefusedPickleError(f"The pickle has {len(data):,} bytes, and the maximum is {MOST_BYTES:,}.")
    _check(data)
    found = _obeyed(data)
    _check_values(found)
    return found


def _obeyed(data: bytes) -> Any:
    try:
        return _Plain(io.BytesIO(data)).load()
    except RefusedPickleError:
        raise
    except (pickle.UnpicklingError, ValueError, TypeError, IndexError, KeyError, EOFError, AttributeError) as error:
        raise RefusedPickleError(f"The pickle is damaged: {error}") from error
    except (OverflowError, MemoryError, RecursionError) as error:
        raise RefusedPickleError(f"The pickle is damaged: {type(error).__name__}") from error


def _check(data: bytes) -> None:
    last = ""
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            last = opcode.name
            _check_one(number, last, argument, position)
    except RefusedPickleError:
        raise
    except Exception as error:  # genops raises whatever a broken argument makes it raise
        raise RefusedPickleError(f"The pickle is damaged: {error}") from error
    if last != "STOP":
        raise RefusedPickleError("The pickle is damaged, because its end is missing.")


def _check_one(number: int, name: str, argument: Any, position: int | None) -> None:
    if name not in ALLOWED:
        raise RefusedPickleError(
            f"Byte {position} is the opcode {name}. Only lists, dicts, tuples, texts, and numbers are supported."
        )
    if number >= MOST_OPS:
        raise RefusedPickleError(f"The pickle has more than {MOST_OPS:,} operations.")
    # The memo is a list as long as its largest number: one that runs ahead asks for memory alone.
    if name in REMEMBERS and int(argument) > number:
        raise RefusedPickleError(
            f"Byte {position} of the pickle uses memo index {argument} after only {number} operations."
        )


def _check_values(found: Any) -> None:
    """What is shared is small in a pickle and in memory, and may be more than there is when it is written out."""
    sizes: dict[int, int] = {}
    begun: set[int] = set()
    stack = [found]
    while stack:
        one = stack[-1]
        key = id(one)
        if key in sizes:
            stack.pop()
        elif not isinstance(one, list | tuple | dict):
            sizes[key] = _size(one)
        elif key in begun:
            sizes[key] = size = 1 + sum(sizes[id(inside)] for inside in _inside(one))
            if size > MOST_VALUES:
                raise RefusedPickleError(
                    f"The pickle contains more than {MOST_VALUES:,} values, counted at each reference."
                )
            begun.remove(key)
        else:
            begun.add(key)
            more = [inside for inside in _inside(one) if id(inside) not in sizes]
            if any(id(inside) in begun for inside in more):
                raise RefusedPickleError("The pickle has a list or dict that contains itself.")
            stack += more


def _inside(one: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterable[Any]:
    return chain(one, one.values()) if isinstance(one, dict) else one


def _size(one: Any) -> int:
    """Of what holds nothing else."""
    if isinstance(one, int) and one.bit_length() > MOST_BITS:
        raise RefusedPickleError(
            f"The pickle has a number of {one.bit_length():,} bits, and the maximum is {MOST_BITS} bits."
        )
    return 1 + len(one) // LETTERS_A_VALUE if isinstance(one, str | bytes) else 1
