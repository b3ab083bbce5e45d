"""Read a dump of PyTorch's flight recorder: a pickle or JSON (torch/csrc/distributed/c10d/FlightRecorder).

The dump has the group, the sequence number, and the issue time of each collective, and with NCCL its begin and end.
With gloo, the dump has no ends, no sends, and no ranks of groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import ijson

from contracts.safe_unpickle import MAX_PLAIN_BYTES, RefusedPickleError, read_plain_pickle
from jobs.runs.traces.events import CollectiveCall
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    FileEvents,
    ImportProblemError,
    TraceFile,
    get_element_bytes,
    parse_axis,
    parse_op,
    parse_rank,
    parse_ranks,
    parse_text,
    parse_whole,
)

KEYS = frozenset({"version", "entries", "pg_config", "pg_status", "comm_lib_version", "nccl_version", "rank"})
SUPPORTED = "Only lists, dicts, tuples, texts, and numbers are supported."
NO_ENTRIES = "The flight recorder dump has no list `entries`."
PEER = re.compile(r"(?:send|recv) ([0-9]{1,5})(?:->|<-)([0-9]{1,5})")


def read_flight_recorder_pickle(source: TraceFile) -> FileEvents:
    with source.open() as file:
        data = file.read(MAX_PLAIN_BYTES + 1)
    try:
        dump = read_plain_pickle(data)
    except RefusedPickleError as error:
        problem = str(error)
        raise ImportProblemError(source.name, "pickle", f"{problem[:1].upper()}{problem[1:]}. {SUPPORTED}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    return _convert_dump(source.name, dump["entries"], dump.get("pg_config"))


def read_flight_recorder_json(source: TraceFile, begins: dict[str, str]) -> FileEvents:
    """Read a JSON dump, one entry at a time.

    Args:
        begins: The result of `check_json_bounds`.
    """
    if begins.get("entries") != "start_array":
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    with source.open() as file:
        groups = next(ijson.items(file, "pg_config", use_float=True), None)
    with source.open() as file:
        return _convert_dump(source.name, ijson.items(file, "entries.item", use_float=True), groups)


def _convert_dump(file: str, entries: Iterable[Any], groups: Any) -> FileEvents:
    rank = parse_rank(file)
    if rank is None:
        raise ImportProblemError(
            file, "name", "The rank of this dump is unknown. End the file name with the rank number."
        )
    calls = list(
        islice(_convert_entries(file, rank, entries, groups if isinstance(groups, dict) else {}), MAX_EVENTS + 1)
    )
    if len(calls) > MAX_EVENTS:
        raise ImportProblemError(file, "entries", f"The file has more than {MAX_EVENTS:,} events.")
    notes = []
    if any(call.ended is None for call in calls):
        notes.append("collectives without a recorded end time are shown as points")
    return FileEvents(file, calls, [], notes)


def _convert_entries(file: str, rank: int, entries: Iterable[Any], groups: Any) -> Iterator[CollectiveCall]:
    ranks_cache: dict[int, tuple[int, ...]] = {}  # by the id of the parsed list or text, which entries share
    for index, entry in enumerate(entries):
        field = f"entries[{index}]"
        if not isinstance(entry, dict):
            raise ImportProblemError(file, field, "The entry of the dump is not a JSON object.")
        name = parse_text(entry.get("profiling_name"), file, f"{field}.profiling_name")
        op = parse_op(name)
        pair = entry.get("process_group")
        group_fields = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (entry.get("pg_id"), "")
        group, description = (parse_text(one, file, f"{field}.process_group") for one in group_fields)
        ranks = _get_ranks(groups.get(group), ranks_cache, file, f"pg_config.{group[:60]}.ranks")
        paired = bool(entry.get("is_p2p"))
        number = parse_whole(
            entry.get("p2p_seq_id" if paired else "collective_seq_id"), file, f"{field}.collective_seq_id"
        )
        created = parse_whole(entry.get("time_created_ns"), file, f"{field}.time_created_ns")
        began = _get_time_ns(entry, "time_discovered_started_ns", file, field) or created
        ended = _get_time_ns(entry, "time_discovered_completed_ns", file, field)
        yield CollectiveCall(
            step=0,
            rank=rank,
            axis=parse_axis(group, description),
            ranks=ranks,
            nth=0,
            sequence=number,
            op=op,
            issued=began / 1e9,
            blocked_s=0.0,
            ended=None if ended is None else max(began, ended) / 1e9,
            payload_bytes=_get_payload_bytes(op, entry),
            peer=_parse_peer(name, ranks),
        )


def _get_ranks(group: Any, cache: dict[int, tuple[int, ...]], file: str, field: str) -> tuple[int, ...]:
    value = group.get("ranks", "") if isinstance(group, dict) else ""
    if id(value) not in cache:
        cache[id(value)] = parse_ranks(value, file, field)
    return cache[id(value)]


def _get_time_ns(entry: dict[str, Any], key: str, file: str, field: str) -> int | None:
    """Return None if the event was not seen, which the dump writes as None or 0."""
    value = entry.get(key)
    return None if not value else parse_whole(value, file, f"{field}.{key}")


def _parse_peer(name: str, ranks: tuple[int, ...]) -> int:
    """Return the peer's rank. The name of the operation has its index in the group."""
    match = PEER.search(name)
    if not match:
        return -1
    index = int(match[2])
    return ranks[index] if index < len(ranks) else index


def _get_payload_bytes(op: str, entry: dict[str, Any]) -> int:
    """Return the bytes of the larger of input and output, which is the full buffer."""
    sizes = [
        sum(_get_tensor_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False))
        for shapes, dtypes in (
            (entry.get(f"{direction}_sizes"), entry.get(f"{direction}_dtypes")) for direction in ("input", "output")
        )
        if isinstance(shapes, list) and isinstance(dtypes, list)
    ]
    return 0 if op == "barrier" else min(2**62, max(sizes, default=0))


def _get_tensor_bytes(shape: object, dtype: object) -> int:
    if not isinstance(shape, list):
        return 0
    count = 1
    for size in shape[:16]:
        count *= size if isinstance(size, int) and 0 <= size < 2**48 else 0
    return min(2**62, count * get_element_bytes(dtype))
