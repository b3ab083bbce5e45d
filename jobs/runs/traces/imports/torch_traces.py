"""Read dumps of PyTorch's flight recorder, as pickle or JSON (torch/csrc/distributed/c10d/FlightRecorder).

A dump has the group, the sequence number, and the issue time of each collective, and with NCCL its begin and end. With
gloo, the dump has no ends, no sends, and no ranks of groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import Any

from contracts.safe_unpickle import MAX_PLAIN_BYTES, RefusedPickleError, read_plain_pickle
from jobs.core.text import is_storable
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    EventFields,
    FileEvents,
    ImportProblemError,
    InvalidItems,
    RecordedCall,
    Recording,
    get_element_bytes,
    parse_axis,
    parse_op,
    parse_rank,
    parse_ranks,
    parse_text,
)
from jobs.runs.traces.imports.json_stream import JsonReader
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import CollectiveCall

MAX_FRAMES = 60  # per call
MAX_FRAME_CHARACTERS = 200
OUTPUT_OPS = ("all_gather", "scatter", "recv")  # whose output has the size that is equal on all ranks
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
NO_ENTRIES = "The flight recorder dump has no list `entries`."
PEER = re.compile(r"(?:send|recv) ([0-9]{1,5})(?:->|<-)([0-9]{1,5})")


def read_flight_recorder_pickle(source: TraceFile) -> FileEvents:
    with source.open() as file:
        data = file.read(MAX_PLAIN_BYTES + 1)
    try:
        dump = read_plain_pickle(data)
    except RefusedPickleError as error:
        problem = str(error)
        supported = "Only lists, dicts, tuples, texts, and numbers are supported."
        raise ImportProblemError(source.name, "pickle", f"{problem[:1].upper()}{problem[1:]}. {supported}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    return _convert_dump(source.name, dump["entries"], dump.get("pg_config"), dump.get("version"))


def read_flight_recorder_json(source: TraceFile) -> FileEvents:
    """Read a JSON dump, one entry at a time."""
    groups: Any = None
    version: Any = None
    has_entries = False
    with source.open() as file:
        reader = JsonReader(source, file)
        for key, value in reader.read():
            groups = value if key == "pg_config" else groups
            version = value if key == "version" else version
        has_entries = "entries" in reader.keys
    if not has_entries:
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    with source.open() as file:
        entries = (value for key, value in JsonReader(source, file).read() if key == "entries")
        return _convert_dump(source.name, entries, groups, version)


def _convert_dump(file: str, entries: Iterable[Any], groups: Any, version: Any) -> FileEvents:
    rank = parse_rank(file)
    if rank is None:
        message = "The rank of this dump is unknown. End the file name with the rank number."
        raise ImportProblemError(file, "name", message)
    groups = groups if isinstance(groups, dict) else {}
    invalid = InvalidItems(file)
    first = _FirstRecord()
    pairs = list(islice(_convert_entries(file, rank, first.observe(entries), groups, invalid), MAX_EVENTS + 1))
    if len(pairs) > MAX_EVENTS:
        raise ImportProblemError(file, "entries", f"The file has more than {MAX_EVENTS:,} events.")
    calls = [call for call, _ in pairs]
    notes = invalid.get_notes(len(pairs))
    if any(call.ended is None for call in calls):
        notes.append("collectives without a recorded end time are shown as points")
    shown = version[:20] if isinstance(version, str) and is_storable(version) else "unknown"
    if not shown.startswith("2."):
        notes.append(f"{file}: the version of the dump is {shown!r}, and the analysis supports the versions 2.x")
    if first.number:
        notes.append(
            f"{file}: the recorder has dropped the first {first.number:,} calls, so the analysis starts later. "
            "Set TORCH_FR_BUFFER_SIZE to a larger number of calls"
        )
    recording = Recording(rank, [one for _, one in pairs], not first.number, shown)
    return FileEvents(file, calls, [], notes, recording=recording)


class _FirstRecord:
    """Find the number of the first entry, which is the number of entries that the ring buffer has dropped."""

    def __init__(self) -> None:
        self.number = 0

    def observe(self, entries: Iterable[Any]) -> Iterator[Any]:
        for index, entry in enumerate(entries):
            number = entry.get("record_id") if index == 0 and isinstance(entry, dict) else None
            if type(number) is int and 0 < number < 2**63:
                self.number = number
            yield entry


def _convert_entries(
    file: str, rank: int, entries: Iterable[Any], groups: Any, invalid: InvalidItems
) -> Iterator[tuple[CollectiveCall, RecordedCall]]:
    """Yield the calls of valid entries."""
    ranks_cache: dict[int, tuple[int, ...]] = {}  # by the id of the parsed list or text, which entries share
    stacks: dict[tuple[str, ...], tuple[str, ...]] = {}
    for index, entry in enumerate(entries):
        try:
            call, group = _convert_entry(file, rank, f"entries[{index}]", entry, groups, ranks_cache)
        except ImportProblemError as error:
            invalid.add(error)
            continue
        stack = _read_stack(entry)
        recorded = _record_call(call, group, entry, stacks.setdefault(stack, stack))
        yield call, recorded


def _convert_entry(
    file: str, rank: int, field: str, entry: Any, groups: Any, ranks_cache: dict[int, tuple[int, ...]]
) -> tuple[CollectiveCall, str]:
    """Return the call and the name of its group."""
    if not isinstance(entry, dict):
        raise ImportProblemError(file, field, "The entry of the dump is not a JSON object.")
    fields = EventFields(file, field, entry)
    name = fields.get_text("profiling_name")
    op = parse_op(name)
    pair = entry.get("process_group")
    group_fields = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (entry.get("pg_id"), "")
    group, description = (parse_text(one, file, f"{field}.process_group") for one in group_fields)
    config = groups.get(group)
    group_ranks = config.get("ranks", "") if isinstance(config, dict) else ""
    if id(group_ranks) not in ranks_cache:
        ranks_cache[id(group_ranks)] = parse_ranks(group_ranks, file, f"pg_config.{group[:60]}.ranks")
    ranks = ranks_cache[id(group_ranks)]
    created = fields.get_whole("time_created_ns")
    # The dump writes None or 0 for an event that it did not see.
    began = fields.get_optional_whole("time_discovered_started_ns") or created
    ended = fields.get_optional_whole("time_discovered_completed_ns")
    call = CollectiveCall(
        step=0,
        rank=rank,
        axis=parse_axis(group, description),
        ranks=ranks,
        nth=0,
        sequence=fields.get_whole("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"),
        op=op,
        issued=began / 1e9,
        blocked_s=None,
        ended=None if ended is None else max(began, ended) / 1e9,
        payload_bytes=0 if op == "barrier" else _get_buffer_bytes(entry),
        peer=_parse_peer(name, ranks),
    )
    return call, group


def _record_call(call: CollectiveCall, group: str, entry: dict[str, Any], stack: tuple[str, ...]) -> RecordedCall:
    inputs, outputs = _count_elements(entry, "input"), _count_elements(entry, "output")
    state = entry.get("state")
    is_gloo = str(entry.get("profiling_name")).startswith("gloo:")  # whose state never changes
    is_all_to_all = call.op == "all_to_all"
    return RecordedCall(
        *(call.rank, group, call.axis, call.ranks, call.sequence, call.op),
        text=_format_call(call.op, inputs, outputs, entry),
        peer=call.peer,
        is_done=None if is_gloo or not isinstance(state, str) else state == "completed",
        has_started=state == "started",
        issued=call.issued,
        stack=stack,
        num_inputs=inputs if is_all_to_all else None,
        num_outputs=outputs if is_all_to_all else None,
        sizes_problem=_check_sizes(call, inputs, outputs),
    )


def _format_call(op: str, inputs: int | None, outputs: int | None, entry: dict[str, Any]) -> str:
    """Format an operation as `format_call` of the meter: "all_reduce of 1,024 float32"."""
    side = "output" if op in OUTPUT_OPS else "input"
    dtypes = entry.get(f"{side}_dtypes")
    valid = [one for one in dtypes if isinstance(one, str) and is_storable(one)] if isinstance(dtypes, list) else []
    names = sorted({DTYPES.get(one, one.lower()) for one in valid})
    number = outputs if op in OUTPUT_OPS else inputs
    if op == "barrier" or not names or number is None:
        return op
    dtype = " and ".join(names[:3])[:60]
    return f"{op} of {dtype}" if op == "all_to_all" else f"{op} of {number:,} {dtype}"


def _check_sizes(call: CollectiveCall, inputs: int | None, outputs: int | None) -> str:
    """Return the contradiction between the input and the output of a collective, or ""."""
    if inputs is None or outputs is None or not (size := len(call.ranks)):
        return ""
    expected = {"all_reduce": inputs, "all_gather": inputs * size, "reduce_scatter": outputs * size}.get(call.op)
    found = inputs if call.op == "reduce_scatter" else outputs
    if expected is None or expected == found:
        return ""
    side = "input" if call.op == "reduce_scatter" else "output"
    return f"calls {call.op} with an {side} of {found:,} elements, but {expected:,} elements are expected"


def _count_elements(entry: dict[str, Any], side: str) -> int | None:
    shapes = entry.get(f"{side}_sizes")
    if not isinstance(shapes, list) or not shapes:
        return None
    if not all(isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in shape) for shape in shapes):
        return None
    number: int = sum(prod(shape[:16]) for shape in shapes)
    return min(2**62, number)


def _read_stack(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the lines of a call as "file:line in function", outermost first."""
    frames = entry.get("frames")
    lines = []
    for frame in frames[:MAX_FRAMES] if isinstance(frames, list) else ():
        if not isinstance(frame, dict):
            continue
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        if isinstance(file, str) and type(line) is int and isinstance(name, str) and is_storable(file + name):
            lines.append(f"{file[-MAX_FRAME_CHARACTERS:]}:{min(line, 2**31)} in {name[:MAX_FRAME_CHARACTERS]}")
    return tuple(lines[::-1])


def _parse_peer(name: str, ranks: tuple[int, ...]) -> int:
    """Return the peer's rank. The name of the operation has its index in the group."""
    match = PEER.search(name)
    if not match:
        return -1
    index = int(match[2])
    return ranks[index] if index < len(ranks) else index


def _get_buffer_bytes(entry: dict[str, Any]) -> int | None:
    """Return the bytes of the larger of input and output, which is the full buffer. None: no size is recorded."""
    sizes = []
    for side in ("input", "output"):
        shapes, dtypes = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
        if not isinstance(shapes, list) or not isinstance(dtypes, list) or len(shapes) != len(dtypes):
            continue
        tensors = [_get_tensor_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if None not in tensors:
            sizes.append(sum(tensor or 0 for tensor in tensors))
    return min(2**62, max(sizes)) if sizes else None


def _get_tensor_bytes(shape: object, dtype: object) -> int | None:
    """Return the bytes of a tensor, or None for an invalid shape or an unknown type."""
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        return None
    element_bytes = get_element_bytes(dtype)
    return min(2**62, prod(shape[:16]) * element_bytes) if element_bytes else None
