"""Share types, limits, and field parsers between the readers of trace formats."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from jobs.core.text import is_storable
from jobs.runs.traces.trace_events import CollectiveCall, WorkSpan

MAX_EVENTS = 500_000  # per import
MAX_LISTED_RANKS = 2**25  # summed over the groups of all collectives
MAX_RANKS = 65_536
MAX_TEXT_LENGTH = 1000

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
KNOWN_AXES = ("dp", "pp", "cp", "ep", "tp")


class ImportProblemError(ValueError):
    """A file cannot be imported. Holds the file name, the field, and the reason."""

    def __init__(self, file: str, field: str, message: str) -> None:
        super().__init__(f"{file}: {field}: {message}")
        self.file, self.field, self.message = file, field, message


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 collective", "2 collectives"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class RecordedCall(NamedTuple):
    """Describe a call in a flight recorder dump. `sizes_problem`: a contradiction between its own input and output.

    `text` is equal on all ranks that call the operation together. `is_done` is None if the dump does not record it.
    """

    rank: int
    group: str
    axis: str
    ranks: tuple[int, ...]
    sequence: int
    op: str
    text: str
    peer: int  # as in `CollectiveCall`
    is_done: bool | None
    has_started: bool
    issued: float
    stack: tuple[str, ...]
    num_inputs: int | None = None  # elements of an all-to-all
    num_outputs: int | None = None
    sizes_problem: str = ""


class Recording(NamedTuple):
    """Hold the calls of a rank. `is_complete`: the recorder has dropped no call."""

    rank: int
    calls: list[RecordedCall]
    is_complete: bool
    version: str


class FileEvents(NamedTuple):
    """Hold the events of one file. Calls of an unknown group have no ranks, and the reader fills them in.

    `groups`: the name of the process group of each call, "" if unknown. Only Kineto traces have it. `recording`: the
    calls of a flight recorder dump, for the analysis of hangs.
    """

    file: str
    calls: list[CollectiveCall]
    spans: list[WorkSpan]
    notes: list[str]
    groups: list[str] = []
    recording: Recording | None = None


class InvalidItems:
    """Collect the problems of invalid entries or lines, which are left out with a note."""

    def __init__(self, file: str) -> None:
        self._file, self._num = file, 0
        self._first: ImportProblemError | None = None

    def add(self, problem: ImportProblemError) -> None:
        self._first = self._first or problem
        self._num += 1

    def get_notes(self, num_valid: int) -> list[str]:
        """Return notes about the problems. Raise the first problem if no item is valid."""
        if self._first is None:
            return []
        if not num_valid:
            raise self._first
        message = self._first.message.rstrip(".")
        further = f", and {self._num - 1:,} further invalid items" if self._num > 1 else ""
        return [f"{self._file}: {self._first.field} is left out{further}: {message}"]


def get_element_bytes(dtype: object) -> int:
    """Return the bytes of an element, 0 for an unknown type. Each float8 type has 1 byte."""
    name = (dtype if isinstance(dtype, str) else "").lower().removeprefix("c10::").removeprefix("torch.")
    return 1 if name.startswith("float8") else ELEMENT_BYTES.get(name, 0)


def parse_op(text: str) -> str:
    """Return the name of a collective: "all_gather" for "nccl:_all_gather_base". Unknown names stay."""
    operation = text.partition(":")[2] or text
    key = re.sub(r"[^a-z]", "", operation.split(" ")[0].lower())
    return OPS.get(key, operation[:60])


def parse_axis(name: str, description: str) -> str:
    """Return the axis in a group's description such as "mesh_tp", or else the description or the name."""
    words = re.split(r"[^a-z]+", description.lower())
    for axis in KNOWN_AXES:
        if axis in words:
            return axis
    if description in ("", "undefined"):
        return f"group {name}"[:60]
    return "world" if description == "default_pg" else description[:60]


NAME_ENDING: Final = re.compile(r"(\.(?:pt|trace|json|gz|pkl|pickle|log|txt|[A-Za-z]+))+$")
# The file names of tensorboard_trace_handler: host, process id, and time in milliseconds or nanoseconds.
HANDLER_NAME: Final = re.compile(r".*_[0-9]+\.[0-9]{10,20}")
IP_ADDRESS: Final = re.compile(r"[0-9]{1,3}([-.][0-9]{1,3}){3}$")
RANK_WORD: Final = re.compile(r"(?<![a-z])(?<!local)(?<!local[-_.])(?:rank|worker)s?[-_.=]?([0-9]+)", re.IGNORECASE)
LAST_NUMBER: Final = re.compile(r"([A-Za-z]*)[-_. ]*([0-9]+)$")
NOT_RANK_WORDS: Final = frozenset(
    [
        *(
            "host",
            "hostname",
            "node",
            "machine",
            "server",
            "ip",
            "gpu",
            "cuda",
            "device",
            "dgx",
            "pod",
            "pid",
            "process",
        ),
        *("step", "steps", "iter", "iteration", "epoch", "run", "job", "seed", "port", "local", "batch", "layer", "v"),
        *("version", "part", "attempt", "try", "date", "time"),
    ]
)


def parse_rank(name: str) -> int | None:
    """Return the rank in a file name: 3 for "rank3_host-12.json.gz" or "trace-3.json". None if it has none.

    The number after "rank" or "worker" is the rank. Otherwise the last number is the rank, but not the number of a
    host, a date, or a step.
    """
    stem = NAME_ENDING.sub("", name)
    marked = [int(number) for number in RANK_WORD.findall(stem) if number.isascii() and len(number.lstrip("0")) <= 5]
    if marked:
        return marked[-1] if marked[-1] < MAX_RANKS else None
    last = LAST_NUMBER.search(stem)
    if not last or RANK_WORD.search(stem) or HANDLER_NAME.fullmatch(stem) or IP_ADDRESS.search(stem):
        return None
    word, number = last[1].lower(), last[2].lstrip("0") or "0"
    if word in NOT_RANK_WORDS or len(number) > 5 or int(number) >= MAX_RANKS:
        return None
    return int(number)


def parse_whole(value: object, file: str, field: str, maximum: int = 2**63 - 1) -> int:
    """Return a required field as a non-negative integer."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
        message = f"The value is {_describe(value)}, but a whole number from 0 to {maximum} is expected."
        raise ImportProblemError(file, field, message)
    return value


def parse_text(value: object, file: str, field: str) -> str:
    """Return an optional field as text, "" if it is missing."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(text := str(value)) > MAX_TEXT_LENGTH:
        expected = f"a text of at most {MAX_TEXT_LENGTH} characters is expected."
        raise ImportProblemError(file, field, f"The value is {_describe(value)}, but {expected}")
    if not is_storable(text):
        message = f"The value is {text[:60]!r}, but Unicode text without NUL characters is expected."
        raise ImportProblemError(file, field, message)
    return text


class EventFields(NamedTuple):
    """Read the fields of an event. Errors name the file and the path of the field."""

    file: str
    path: str
    values: dict[str, Any]

    def get_whole(self, name: str, maximum: int = 2**63 - 1) -> int:
        return parse_whole(self.values.get(name), self.file, f"{self.path}.{name}", maximum)

    def get_optional_whole(self, name: str) -> int | None:
        return self.get_whole(name) if self.values.get(name) else None

    def get_text(self, name: str, default: str = "") -> str:
        return parse_text(self.values.get(name, default), self.file, f"{self.path}.{name}")


def _describe(value: object) -> str:
    """Describe a value. Containers are not written out, because they may hold a million values."""
    return f"a {type(value).__name__}" if isinstance(value, list | tuple | dict) else repr(str(value)[:60])


def parse_ranks(value: object, file: str, field: str) -> tuple[int, ...]:
    """Parse "[0, 1]" or a list of ranks. Return () if it is empty or truncated with "..."."""
    if isinstance(value, str):
        if "..." in value or not re.fullmatch(r"\s*\[?[0-9,\s]*\]?\s*", value):
            return ()
        value = [int(number) for number in re.findall(r"[0-9]{1,6}", value)]
    if not isinstance(value, list | tuple):
        return ()
    return tuple(parse_whole(rank, file, field, MAX_RANKS) for rank in value)
