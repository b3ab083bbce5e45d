"""What a reader makes of a file, and how it says that it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from jobs.core.text import storable
from jobs.runs.traces.shapes import Call, Span

MOST_EVENTS = 500_000  # of an import
MOST_NAMED = 2**25  # ranks, which each collective has those of its group of
MOST_RANKS = 65_536
LONGEST_WORD = 1000

ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "longlong", "int64", "uint64", "float64", "complexfloat"), 8),
    **dict.fromkeys(("float", "int", "int32", "uint32", "float32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "int16", "uint16", "float16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8"), 1),
    "complexdouble": 16,
}
OPS = {
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier")},
    **dict.fromkeys(("allreduce", "allreducecoalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "allgatherbase", "allgatherintotensor", "allgatherv"), "all_gather"),
    **dict.fromkeys(("reducescatter", "reducescatterbase", "reducescattertensor", "reducescatterv"), "reduce_scatter"),
    **dict.fromkeys(("alltoall", "alltoallbase", "alltoallv", "alltoallsingle"), "all_to_all"),
}
AXES = ("dp", "pp", "cp", "ep", "tp")


class ImportProblemError(ValueError):
    """What is wrong with a file: its name, where in it, and why."""

    def __init__(self, file: str, field: str, message: str) -> None:
        super().__init__(f"{file}: {field}: {message}")
        self.file, self.field, self.message = file, field, message


class Part(NamedTuple):
    """One file. A call whose group was not told has no ranks: those of all files that have it are meant."""

    file: str
    calls: list[Call]
    spans: list[Span]
    notes: list[str]


Open = Callable[[], IO[bytes]]


class Source(NamedTuple):
    """A file as it was sent, under the name that its sender gave it. `open` gives it unpacked."""

    name: str
    path: Path
    open: Open


def element_bytes(dtype: object) -> int:
    """0 of a type that nobody here knows; "Float8_e4m3fn" and its kin are one byte."""
    name = (dtype if isinstance(dtype, str) else "").lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if name.startswith("float8") else ELEMENT_BYTES.get(name, 0)


def op_of(text: str) -> str:
    """'nccl:_all_gather_base' is all_gather; a name that is none of ours stays as it is."""
    word = text.partition(":")[2] or text
    key = re.sub(r"[^a-z]", "", word.split(" ")[0].lower())
    return OPS.get(key, word[:60])


def axis_of(name: str, description: str) -> str:
    """An axis where the group's description says one, as "mesh_tp" does; else its description, else its name."""
    words = re.split(r"[^a-z]+", description.lower())
    for axis in AXES:
        if axis in words:
            return axis
    if description in ("", "undefined"):
        return f"group {name}"[:60]
    return "world" if description == "default_pg" else description[:60]


def rank_in(name: str) -> int | None:
    """The last number of a file's name without its endings: "trace_rank_3.json.gz" is 3. A date, or a time, is none."""
    numbers = re.findall(r"0*([0-9]+)", re.sub(r"(\.[A-Za-z]+)+$", "", name))
    if not numbers or len(numbers[-1]) > 5 or int(numbers[-1]) >= MOST_RANKS:
        return None
    return int(numbers[-1])


def whole(value: object, file: str, field: str, most: int = 2**63 - 1) -> int:
    """A whole number from 0 on, of a field that must be one."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ImportProblemError(
            file, field, f"The value is {_shown(value)}, but a whole number from 0 to {most} is expected."
        )
    return value


def word(value: object, file: str, field: str) -> str:
    """A text, or a number as one, of a field that may be missing."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(told := str(value)) > LONGEST_WORD:
        raise ImportProblemError(
            file, field, f"The value is {_shown(value)}, but a text of at most {LONGEST_WORD} characters is expected."
        )
    if not storable(told):
        raise ImportProblemError(
            file, field, f"The value is {told[:60]!r}, but Unicode text without NUL characters is expected."
        )
    return told


def _shown(value: object) -> str:
    """A list is not written out: what it holds may be there a million times."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__}"
    return repr(str(value)[:60])


def ranks_of(value: object, file: str, field: str) -> tuple[int, ...]:
    """'[0, 1]' or a list of it; nothing where it is empty, or was cut with "..."."""
    if isinstance(value, str):
        if "..." in value or not re.fullmatch(r"\s*\[?[0-9,\s]*\]?\s*", value):
            return ()
        value = [int(number) for number in re.findall(r"[0-9]{1,6}", value)]
    if not isinstance(value, list | tuple):
        return ()
    return tuple(whole(rank, file, field, MOST_RANKS) for rank in value)
