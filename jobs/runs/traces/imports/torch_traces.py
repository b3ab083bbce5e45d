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
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    EventFields,
    FileEvents,
    ImportProblemError,
    InvalidItems,
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
    return _convert_dump(source.name, dump["entries"], dump.get("pg_config"))


def read_flight_recorder_json(source: TraceFile) -> FileEvents:
    """Read a JSON dump, one entry at a time."""
    groups: Any = None
    has_entries = False
    with source.open() as file:
        reader = JsonReader(source, file)
        for key, value in reader.read():
            groups = value if key == "pg_config" else groups
        has_entries = "entries" in reader.keys
    if not has_entries:
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    with source.open() as file:
        entries = (value for key, value in JsonReader(source, file).read() if key == "entries")
        return _convert_dump(source.name, entries, groups)


def _convert_dump(file: str, entries: Iterable[Any], groups: Any) -> FileEvents:
    rank = parse_rank(file)
    if rank is None:
        message = "The rank of this dump is unknown. End the file name with the rank number."
        raise ImportProblemError(file, "name", message)
    groups = groups if isinstance(groups, dict) else {}
    invalid = InvalidItems(file)
    calls = list(islice(_convert_entries(file, rank, entries, groups, invalid), MAX_EVENTS + 1))
    if len(calls) > MAX_EVENTS:
        raise ImportProblemError(file, "entries", f"The file has more than {MAX_EVENTS:,} events.")
    notes = invalid.get_notes(len(calls))
    if any(call.ended is None for call in calls):
        notes.append("collectives without a recorded end time are shown as points")
    return FileEvents(file, calls, [], notes)


def _convert_entries(
    file: str, rank: int, entries: Iterable[Any], groups: Any, invalid: InvalidItems
) -> Iterator[CollectiveCall]:
    """Yield the calls of valid entries."""
    ranks_cache: dict[int, tuple[int, ...]] = {}  # by the id of the parsed list or text, which entries share
    for index, entry in enumerate(entries):
        try:
            yield _convert_entry(file, rank, f"entries[{index}]", entry, groups, ranks_cache)
        except ImportProblemError as error:
            invalid.add(error)


def _convert_entry(
    file: str, rank: int, field: str, entry: Any, groups: Any, ranks_cache: dict[int, tuple[int, ...]]
) -> CollectiveCall:
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
    return CollectiveCall(
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
