"""A log of NCCL's Inspector plug-in: an object a line for each collective of each communicator.

As NCCL's plugins/profiler/inspector writes it: format v4.0 to v4.2, where each line has its header, and v4.3, where the
lines after a `dump_stats` share that one's. Kernel times are there with NCCL_INSPECTOR_DUMP_VERBOSE=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from jobs.runs.traces.imports.parts import (
    MOST_EVENTS,
    MOST_RANKS,
    ImportProblemError,
    Part,
    Source,
    op_of,
    whole,
    word,
)
from jobs.runs.traces.shapes import Call

KEYS = frozenset({"header", "metadata", "coll_perf", "p2p_perf", "proxy_trace", "dump_stats"})
LONGEST_LINE = 2**20
# Told by what one rank gives: the full buffer is as often as there are ranks.
GATHERED = {"all_gather", "reduce_scatter"}


class _Record(NamedTuple):
    """A line: who it is of, and what. Nothing else of the line is kept: it may weigh a hundred times more."""

    process: tuple[str, int]
    comm: str
    place: int
    size: int
    timed: bool
    call: Call  # its peer is a place in the communicator too: ranks of the world are told by all files together


def read(sources: list[Source]) -> list[Part]:
    """All files together: a communicator knows its own ranks only, so the world's are those of the largest."""
    records: dict[str, list[_Record]] = {}
    for source in sources:
        records[source.name] = list(_records(source, MOST_EVENTS - sum(map(len, records.values()))))
    every = [record for found in records.values() for record in found]
    world = _world(every)
    members: dict[str, dict[int, int]] = {}
    for record in every:
        members.setdefault(record.comm, {})[record.place] = world[record.process]
    groups = {comm: tuple(sorted(known.values())) for comm, known in members.items()}
    parts = []
    for file, found in records.items():
        notes = []
        if not all(record.timed for record in found):
            notes.append(
                "without NCCL_INSPECTOR_DUMP_VERBOSE=1, the log has no times of collectives, "
                "so each collective ends at the time of its log line"
            )
        calls = [
            record.call._replace(
                rank=world[record.process],
                # With a file of each rank all are known.
                ranks=groups[record.comm] if len(groups[record.comm]) == record.size else (),
                peer=members[record.comm].get(record.call.peer, -1),
            )
            for record in found
        ]
        parts.append(Part(file, calls, [], notes))
    return parts


def _world(records: list[_Record]) -> dict[tuple[str, int], int]:
    """The rank of each process: its place in the largest communicator it is in; by order where two would be one."""
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for record in records:
        if record.size > best.get(record.process, (0, 0))[0]:
            best[record.process] = record.size, record.place
    ranks = {process: rank for process, (_, rank) in best.items()}
    if len(set(ranks.values())) == len(ranks):
        return ranks
    return {process: place for place, process in enumerate(sorted(ranks))}


def _kernels(told: dict[str, Any]) -> tuple[int, int] | None:
    """First start and last stop of its kernels, microseconds; None where the line does not say."""
    times = told.get("event_trace_ts")
    events = times.get("kernel_events") if isinstance(times, dict) else None
    found = [event for event in events or [] if isinstance(event, dict)]
    starts = [time for event in found if _is_time(time := event.get("kernel_start_ts"))]
    stops = [time for event in found if _is_time(time := event.get("kernel_stop_ts"))]
    return (min(starts), max(stops)) if starts and len(starts) == len(stops) == len(found) else None


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def _records(source: Source, most: int) -> Iterator[_Record]:
    context: dict[str, Any] | None = None
    count = 0
    with source.open() as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            if len(raw) > LONGEST_LINE:
                raise ImportProblemError(
                    source.name, f"line {number}", f"The log line is longer than {LONGEST_LINE:,} bytes."
                )
            if not raw.strip():
                continue
            line = _object(source.name, number, raw)
            if "dump_stats" in line:
                context = line
                continue
            whole_line = line if "header" in line else {**(context or {}), **line}
            kind = next((key for key in ("coll_perf", "p2p_perf") if key in line), None)
            if kind is None:
                continue
            count += 1
            if count > most:
                raise ImportProblemError(
                    source.name, f"line {number}", f"The file has more than {MOST_EVENTS:,} collectives."
                )
            yield _record(source.name, number, whole_line, kind)


def _object(file: str, number: int, raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImportProblemError(file, f"line {number}", f"The log line is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ImportProblemError(file, f"line {number}", "The log line is not a JSON object.")
    return line


def _record(file: str, number: int, line: dict[str, Any], kind: str) -> _Record:
    header, metadata, told = line.get("header"), line.get("metadata"), line[kind]
    for name, value in (("header", header), ("metadata", metadata), (kind, told)):
        if not isinstance(value, dict):
            raise ImportProblemError(file, f"line {number}: {name}", "is missing")
    assert isinstance(header, dict)
    assert isinstance(metadata, dict)
    where = f"line {number}: "
    host = word(metadata.get("hostname"), file, f"{where}metadata.hostname")
    process = host[:255], whole(metadata.get("pid"), file, f"{where}metadata.pid")
    comm = word(header.get("id"), file, f"{where}header.id")[:60]
    name = word(header.get("comm_name", "unknown"), file, f"{where}header.comm_name")[:60]
    place = whole(header.get("rank"), file, f"{where}header.rank", MOST_RANKS)
    size = whole(header.get("n_ranks"), file, f"{where}header.n_ranks", MOST_RANKS)
    dumped_us = whole(metadata.get("dump_timestamp_us"), file, f"{where}metadata.dump_timestamp_us", 2**62)
    short, field = kind.removesuffix("_perf"), f"{where}{kind}"
    op = op_of(word(told.get(short), file, f"{field}.{short}"))
    sent = whole(told.get(f"{short}_msg_size_bytes"), file, f"{field}.{short}_msg_size_bytes")
    took = whole(told.get(f"{short}_exec_time_us"), file, f"{field}.{short}_exec_time_us", 10**12)
    kernels = _kernels(told)
    began, ended = kernels or (dumped_us - took, dumped_us)
    call = Call(
        step=0,
        rank=-1,
        axis=f"comm {name if name != 'unknown' else comm}"[:60],
        ranks=(),
        nth=0,
        sequence=whole(told.get(f"{short}_sn"), file, f"{field}.{short}_sn"),
        op=op,
        issued=began / 1e6,
        blocked_s=0.0,
        ended=max(began, ended) / 1e6,
        payload_bytes=min(2**62, sent * size if op in GATHERED else sent),
        peer=whole(told.get("p2p_peer"), file, f"{field}.p2p_peer", MOST_RANKS) if short == "p2p" else -1,
    )
    return _Record(process, comm, place, size, kernels is not None, call)
