"""Share types, limits, and field parsers between the readers of trace formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import ijson

from jobs.core.text import is_storable
from jobs.runs.traces.traced_steps import CollectiveCall, WorkSpan

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


class FileEvents(NamedTuple):
    """Hold the events of one file. Calls of an unknown group have no ranks, and the reader fills them in."""

    file: str
    calls: list[CollectiveCall]
    spans: list[WorkSpan]
    notes: list[str]


class TraceFile(NamedTuple):
    """Locate an uploaded file. `name` comes from the client, `open` decompresses the file."""

    name: str
    path: Path
    open: Callable[[], IO[bytes]]


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


def parse_rank(name: str) -> int | None:
    """Return the last number of a file name: 3 for "trace_rank_3.json.gz". Numbers of a date or time are too long."""
    numbers = re.findall(r"0*([0-9]+)", re.sub(r"(\.[A-Za-z]+)+$", "", name))
    if not numbers or len(numbers[-1]) > 5 or int(numbers[-1]) >= MAX_RANKS:
        return None
    return int(numbers[-1])


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


MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 100_000  # in one event, or under one other key
EVENT_LISTS = frozenset({"traceEvents", "entries"})  # read one event at a time
MAX_LISTED_EVENTS = 8 * MAX_EVENTS


def read_first_key(source: TraceFile) -> str | None:
    """Return the first key of the file's JSON object, or None if the file has no object."""
    with source.open() as file:
        try:
            events = ijson.basic_parse(file, use_float=True)
            return str(next(events)[1]) if next(events)[0] == "start_map" else None
        except (ijson.JSONError, UnicodeDecodeError, StopIteration):
            return None


def check_json_bounds(source: TraceFile) -> dict[str, str]:
    """Check the depth and the size of JSON before it is parsed, because the file size bounds neither.

    Return the ijson event that begins the value of each key: "start_array", "start_map", "number" and so on.

    Raises:
        ijson.JSONError, UnicodeDecodeError: The file is not JSON.
    """
    first_events: dict[str, str] = {}
    key, depth, num_values, num_listed = "", 0, 0, 0
    with source.open() as file:
        for event, value in ijson.basic_parse(file, use_float=True):
            if depth == 1:
                if event == "map_key":
                    key, num_values = value, 0
                    continue
                first_events.setdefault(key, event)
            if event in ("start_map", "start_array"):
                depth += 1
                if depth > MAX_JSON_DEPTH:
                    message = f"The JSON is nested deeper than {MAX_JSON_DEPTH} levels."
                    raise ImportProblemError(source.name, key[:60] or "JSON", message)
            elif event in ("end_map", "end_array"):
                depth -= 1
            if depth == 2 and key in EVENT_LISTS:
                num_values, num_listed = 0, num_listed + 1
                if num_listed > MAX_LISTED_EVENTS:
                    raise ImportProblemError(source.name, key, f"The file has more than {MAX_LISTED_EVENTS:,} events.")
            num_values += 1
            if num_values > MAX_JSON_VALUES:
                message = f"The JSON has more than {MAX_JSON_VALUES:,} values."
                raise ImportProblemError(source.name, key[:60] or "JSON", message)
    return first_events
