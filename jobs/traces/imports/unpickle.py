"""Reads a pickle that holds builtin containers and scalars, and refuses every other before anything of it runs.

A pickle is a program. Two fences: its opcodes are read first, without obeying them, and one that could name or call
something is refused, as is what would ask for much memory; then the machine that obeys them knows no names.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any, NoReturn

MOST_BYTES = 32 * 2**20
MOST_OPS = 4_000_000
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
        raise RefusedPickleError(f"it names {module}.{name}; only plain containers, texts and numbers are read")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise RefusedPickleError("it points outside itself")


def load(data: bytes) -> Any:
    """What a pickle of plain data holds.

    Raises:
        RefusedPickleError: it is too large, broken, or more than plain data.
    """
    if len(data) > MOST_BYTES:
        raise RefusedPickleError(f"{len(data):,} bytes are more than {MOST_BYTES:,}")
    _check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except RefusedPickleError:
        raise
    except (pickle.UnpicklingError, ValueError, TypeError, IndexError, KeyError, EOFError, AttributeError) as error:
        raise RefusedPickleError(f"it is broken: {error}") from error
    except (OverflowError, MemoryError, RecursionError) as error:
        raise RefusedPickleError(f"it is broken: {type(error).__name__}") from error


def _check(data: bytes) -> None:
    last = ""
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            last = opcode.name
            _check_one(number, last, argument, position)
    except RefusedPickleError:
        raise
    except Exception as error:  # genops raises whatever a broken argument makes it raise
        raise RefusedPickleError(f"it is broken: {error}") from error
    if last != "STOP":
        raise RefusedPickleError("it is broken: it has no end")


def _check_one(number: int, name: str, argument: Any, position: int | None) -> None:
    if name not in ALLOWED:
        raise RefusedPickleError(f"byte {position} is {name}; only plain containers, texts and numbers are read")
    if number >= MOST_OPS:
        raise RefusedPickleError(f"it has more than {MOST_OPS:,} operations")
    # The memo is a list as long as its largest number: one that runs ahead asks for memory alone.
    if name in REMEMBERS and int(argument) > number:
        raise RefusedPickleError(f"byte {position} remembers place {argument} after {number} operations")
