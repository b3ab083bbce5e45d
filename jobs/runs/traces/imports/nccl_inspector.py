"""Read a log of NCCL's Inspector plug-in: one JSON object per collective of a communicator.

Formats v4.0 to v4.2 of NCCL's plugins/profiler/inspector have a header in each line. In v4.3, lines after a
`dump_stats` share its header. Kernel times need NCCL_INSPECTOR_DUMP_VERBOSE=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from jobs.runs.traces.events import CollectiveCall
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    MAX_RANKS,
    FileEvents,
    ImportProblemError,
    TraceFile,
    parse_op,
    parse_text,
    parse_whole,
)

KEYS = frozenset({"header", "metadata", "coll_perf", "p2p_perf", "proxy_trace", "dump_stats"})
MAX_LINE_BYTES = 2**20
# The log has the bytes of one rank, and the full buffer has those of all ranks.
SHARDED_OPS = {"all_gather", "reduce_scatter"}


class _Record(NamedTuple):
    """Hold one log line. Its other fields are dropped, because they may need a hundred times the memory."""

    process: tuple[str, int]
    comm: str
    comm_rank: int
    comm_size: int
    has_kernel_times: bool
    call: (
        CollectiveCall  # its peer is a place in the communicator too: ranks of the world are told by all files together
    )


def read_nccl_inspector(sources: list[TraceFile]) -> list[FileEvents]:
    """Read all files together. World ranks are the ranks of the largest communicator."""
    records: dict[str, list[_Record]] = {}
    for source in sources:
        records[source.name] = list(_read_records(source, MAX_EVENTS - sum(map(len, records.values()))))
    all_records = [record for file_records in records.values() for record in file_records]
    world = _find_world_ranks(all_records)
    members: dict[str, dict[int, int]] = {}
    for record in all_records:
        members.setdefault(record.comm, {})[record.comm_rank] = world[record.process]
    groups = {comm: tuple(sorted(world_ranks.values())) for comm, world_ranks in members.items()}
    files = []
    for file, file_records in records.items():
        notes = []
        if not all(record.has_kernel_times for record in file_records):
            notes.append(
                "without NCCL_INSPECTOR_DUMP_VERBOSE=1, the log has no times of collectives, "
                "so each collective ends at the time of its log line"
            )
        calls = [
            record.call._replace(
                rank=world[record.process],
                # All ranks are known if each rank has a file.
                ranks=groups[record.comm] if len(groups[record.comm]) == record.comm_size else (),
                peer=members[record.comm].get(record.call.peer, -1),
            )
            for record in file_records
        ]
        files.append(FileEvents(file, calls, [], notes))
    return files


def _find_world_ranks(records: list[_Record]) -> dict[tuple[str, int], int]:
    """Return the rank of each process in its largest communicator, or its sorted index if two ranks are equal."""
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for record in records:
        if record.comm_size > best.get(record.process, (0, 0))[0]:
            best[record.process] = record.comm_size, record.comm_rank
    ranks = {process: rank for process, (_, rank) in best.items()}
    if len(set(ranks.values())) == len(ranks):
        return ranks
    return {process: rank for rank, process in enumerate(sorted(ranks))}


def _get_kernel_times(performance: dict[str, Any]) -> tuple[int, int] | None:
    """Return the first start and last stop of the kernels in microseconds, or None if a time is missing."""
    times = performance.get("event_trace_ts")
    events = times.get("kernel_events") if isinstance(times, dict) else None
    kernels = [event for event in events or [] if isinstance(event, dict)]
    starts = [time for event in kernels if _is_time(time := event.get("kernel_start_ts"))]
    stops = [time for event in kernels if _is_time(time := event.get("kernel_stop_ts"))]
    return (min(starts), max(stops)) if starts and len(starts) == len(stops) == len(kernels) else None


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def _read_records(source: TraceFile, max_records: int) -> Iterator[_Record]:
    context: dict[str, Any] | None = None
    num_records = 0
    with source.open() as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(raw) > MAX_LINE_BYTES:
                raise ImportProblemError(
                    source.name, f"line {number}", f"The log line is longer than {MAX_LINE_BYTES:,} bytes."
                )
            if not raw.strip():
                continue
            line = _parse_line(source.name, number, raw)
            if "dump_stats" in line:
                context = line
                continue
            whole_line = line if "header" in line else {**(context or {}), **line}
            kind = next((key for key in ("coll_perf", "p2p_perf") if key in line), None)
            if kind is None:
                continue
            num_records += 1
            if num_records > max_records:
                raise ImportProblemError(
                    source.name, f"line {number}", f"The file has more than {MAX_EVENTS:,} collectives."
                )
            yield _parse_record(source.name, number, whole_line, kind)


def _parse_line(file: str, number: int, raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImportProblemError(file, f"line {number}", f"The log line is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ImportProblemError(file, f"line {number}", "The log line is not a JSON object.")
    return line


def _parse_record(file: str, number: int, line: dict[str, Any], kind: str) -> _Record:
    header, metadata, performance = line.get("header"), line.get("metadata"), line[kind]
    for name, value in (("header", header), ("metadata", metadata), (kind, performance)):
        if not isinstance(value, dict):
            raise ImportProblemError(file, f"line {number}: {name}", "is missing")
    assert isinstance(header, dict)
    assert isinstance(metadata, dict)
    prefix = f"line {number}: "
    host = parse_text(metadata.get("hostname"), file, f"{prefix}metadata.hostname")
    process = host[:255], parse_whole(metadata.get("pid"), file, f"{prefix}metadata.pid")
    comm = parse_text(header.get("id"), file, f"{prefix}header.id")[:60]
    name = parse_text(header.get("comm_name", "unknown"), file, f"{prefix}header.comm_name")[:60]
    comm_rank = parse_whole(header.get("rank"), file, f"{prefix}header.rank", MAX_RANKS)
    comm_size = parse_whole(header.get("n_ranks"), file, f"{prefix}header.n_ranks", MAX_RANKS)
    dumped_us = parse_whole(metadata.get("dump_timestamp_us"), file, f"{prefix}metadata.dump_timestamp_us", 2**62)
    short, field = kind.removesuffix("_perf"), f"{prefix}{kind}"
    peer = parse_whole(performance.get("p2p_peer"), file, f"{field}.p2p_peer", MAX_RANKS) if short == "p2p" else -1
    op = parse_op(parse_text(performance.get(short), file, f"{field}.{short}"))
    message_bytes = parse_whole(performance.get(f"{short}_msg_size_bytes"), file, f"{field}.{short}_msg_size_bytes")
    duration_us = parse_whole(performance.get(f"{short}_exec_time_us"), file, f"{field}.{short}_exec_time_us", 10**12)
    kernels = _get_kernel_times(performance)
    began, ended = kernels or (dumped_us - duration_us, dumped_us)
    call = CollectiveCall(
        step=0,
        rank=-1,
        axis=f"comm {name if name != 'unknown' else comm}"[:60],
        ranks=(),
        nth=0,
        sequence=parse_whole(performance.get(f"{short}_sn"), file, f"{field}.{short}_sn"),
        op=op,
        issued=began / 1e6,
        blocked_s=0.0,
        ended=max(began, ended) / 1e6,
        payload_bytes=min(2**62, message_bytes * comm_size if op in SHARDED_OPS else message_bytes),
        peer=peer,
    )
    return _Record(process, comm, comm_rank, comm_size, kernels is not None, call)
