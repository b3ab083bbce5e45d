"""Find the variable to which a script assigns the result of a call, from the bytecode of the script."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

MAX_FRAMES = 4  # of functions that return the result
MAX_CACHED_CALLS = 256
# Instructions between a call and the assignment of its result, as in `self.group = create(...)[0]`.
_STEPS = ("BINARY_SUBSCR", "BINARY_OP", "CACHE", "COPY", "DUP_TOP", "EXTENDED_ARG", "NOP", "SWAP", "UNPACK_SEQUENCE")
_MAX_STEPS = 12


class _Target(NamedTuple):
    """Variable of a result. The result is returned to the caller if `is_returned`."""

    name: str
    is_local: bool
    is_returned: bool


def find_variable(frame: FrameType | None) -> str:
    """Return the variable that gets the result of the current call of a frame, or an empty string.

    A local variable that the function copies to an attribute or a global variable has the name of the latter.
    """
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        target = _find_target(frame.f_code, frame.f_lasti)
        if target.name or not target.is_returned:
            return target.name
        frame = frame.f_back
    return ""


@lru_cache(MAX_CACHED_CALLS)
def _find_target(code: CodeType, offset: int) -> _Target:
    instructions = [each for each in dis.get_instructions(code) if each.offset > offset]
    target = _read_target(instructions[:_MAX_STEPS])
    if not target.is_local:
        return target
    for index, each in enumerate(instructions):
        if each.opname.startswith("LOAD_FAST") and each.argval == target.name:
            copied = _read_target(instructions[index + 1 : index + 4])
            if copied.name and not copied.is_local:
                return copied
    return target


def _read_target(instructions: list[dis.Instruction]) -> _Target:
    """Return where the value on the stack is stored."""
    key = ""
    for each in instructions:
        if each.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_FAST", "STORE_DEREF"):
            return _Target(str(each.argval), each.opname == "STORE_FAST", is_returned=False)
        if each.opname == "STORE_SUBSCR":
            return _Target(key, is_local=False, is_returned=False)
        if each.opname == "RETURN_VALUE":
            return _Target("", is_local=False, is_returned=True)
        if each.opname.startswith("LOAD_"):
            key = each.argval if isinstance(each.argval, str) and each.opname == "LOAD_CONST" else ""
        elif each.opname not in _STEPS:
            break
    return _Target("", is_local=False, is_returned=False)
