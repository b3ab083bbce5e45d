"""A dump of PyTorch's flight recorder: a pickle, or JSON (torch/csrc/distributed/c10d/FlightRecorder).

It names each collective of a rank with its group and number, when it was issued, and on NCCL when it began and ended.
gloo's has no ends, no sends, and does not say which ranks a group has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import ijson

from contracts.safe_unpickle import MAX_PLAIN_BYTES, RefusedPickleError, read_plain_pickle
from jobs.runs.traces.imports.parts import (
    MOST_EVENTS,
    ImportProblemError,
    Part,
    Source,
    axis_of,
    element_bytes,
    op_of,
    rank_in,
    ranks_of,
    whole,
    word,
)
from jobs.runs.traces.shapes import Call

KEYS = frozenset({"version", "entries", "pg_config", "pg_status", "comm_lib_version", "nccl_version", "rank"})
SUPPORTED = "Only lists, dicts, tuples, texts, and numbers are supported."
NO_ENTRIES = "The flight recorder dump has no list `entries`."
PEER = re.compile(r"(?:send|recv) ([0-9]{1,5})(?:->|<-)([0-9]{1,5})")


def read_pickle(source: Source) -> Part:
    with source.open() as file:
        data = file.read(MAX_PLAIN_BYTES + 1)
    try:
        dump = read_plain_pickle(data)
    except RefusedPickleError as error:
        problem = str(error)
        raise ImportProblemError(source.name, "pickle", f"{problem[:1].upper()}{problem[1:]}. {SUPPORTED}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    return _read(source.name, dump["entries"], dump.get("pg_config"))


def read_json(source: Source, begins: dict[str, str]) -> Part:
    """`begins` as `looked_through` found it. Entries are made one at a time."""
    if begins.get("entries") != "start_array":
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    with source.open() as file:
        groups = next(ijson.items(file, "pg_config", use_float=True), None)
    with source.open() as file:
        return _read(source.name, ijson.items(file, "entries.item", use_float=True), groups)


def _read(file: str, entries: Iterable[Any], groups: Any) -> Part:
    rank = rank_in(file)
    if rank is None:
        raise ImportProblemError(
            file, "name", "The rank of this dump is unknown. End the file name with the rank number."
        )
    calls = list(islice(_calls(file, rank, entries, groups if isinstance(groups, dict) else {}), MOST_EVENTS + 1))
    if len(calls) > MOST_EVENTS:
        raise ImportProblemError(file, "entries", f"The file has more than {MOST_EVENTS:,} events.")
    notes = []
    if any(call.ended is None for call in calls):
        notes.append("collectives without a recorded end time are shown as points")
    return Part(file, calls, [], notes)


def _calls(file: str, rank: int, entries: Iterable[Any], groups: Any) -> Iterator[Call]:
    known: dict[int, tuple[int, ...]] = {}  # by the list or text that says so: entries share it
    for place, entry in enumerate(entries):
        field = f"entries[{place}]"
        if not isinstance(entry, dict):
            raise ImportProblemError(file, field, "The entry of the dump is not a JSON object.")
        name = word(entry.get("profiling_name"), file, f"{field}.profiling_name")
        op = op_of(name)
        pair = entry.get("process_group")
        told = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (entry.get("pg_id"), "")
        group, description = (word(one, file, f"{field}.process_group") for one in told)
        ranks = _ranks(groups.get(group), known, file, f"pg_config.{group[:60]}.ranks")
        paired = bool(entry.get("is_p2p"))
        number = whole(entry.get("p2p_seq_id" if paired else "collective_seq_id"), file, f"{field}.collective_seq_id")
        created = whole(entry.get("time_created_ns"), file, f"{field}.time_created_ns")
        began = _moment(entry, "time_discovered_started_ns", file, field) or created
        ended = _moment(entry, "time_discovered_completed_ns", file, field)
        yield Call(
            step=0,
            rank=rank,
            axis=axis_of(group, description),
            ranks=ranks,
            nth=0,
            sequence=number,
            op=op,
            issued=began / 1e9,
            blocked_s=0.0,
            ended=None if ended is None else max(began, ended) / 1e9,
            payload_bytes=_payload(op, entry),
            peer=_peer(name, ranks),
        )


def _ranks(group: Any, known: dict[int, tuple[int, ...]], file: str, field: str) -> tuple[int, ...]:
    told = group.get("ranks", "") if isinstance(group, dict) else ""
    if id(told) not in known:
        known[id(told)] = ranks_of(told, file, field)
    return known[id(told)]


def _moment(entry: dict[str, Any], key: str, file: str, field: str) -> int | None:
    """None and 0 alike say that it was not seen."""
    value = entry.get(key)
    return None if not value else whole(value, file, f"{field}.{key}")


def _peer(name: str, ranks: tuple[int, ...]) -> int:
    """The other's rank, which a name tells by its place in the group."""
    found = PEER.search(name)
    if not found:
        return -1
    place = int(found[2])
    return ranks[place] if place < len(ranks) else place


def _payload(op: str, entry: dict[str, Any]) -> int:
    """The full buffer: of what went in and what came out the larger."""
    sizes = [
        sum(_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False))
        for shapes, dtypes in ((entry.get(f"{way}_sizes"), entry.get(f"{way}_dtypes")) for way in ("input", "output"))
        if isinstance(shapes, list) and isinstance(dtypes, list)
    ]
    return 0 if op == "barrier" else min(2**62, max(sizes, default=0))


def _bytes(shape: object, dtype: object) -> int:
    if not isinstance(shape, list):
        return 0
    count = 1
    for size in shape[:16]:
        count *= size if isinstance(size, int) and 0 <= size < 2**48 else 0
    return min(2**62, count * element_bytes(dtype))
