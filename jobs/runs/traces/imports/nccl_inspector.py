"""Read a log of NCCL's Inspector plug-in: one JSON object per collective of a communicator.

Formats v4.0 to v4.2 of NCCL's plugins/profiler/inspector have a header in each line. In v4.3, lines after a
`dump_stats` share its header. Kernel times need NCCL_INSPECTOR_DUMP_VERBOSE=1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice
from typing import IO, Any, NamedTuple, TypeGuard

from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    MAX_RANKS,
    EventFields,
    FileEvents,
    ImportProblemError,
    InvalidItems,
    parse_op,
)
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import CollectiveCall

KEYS = frozenset({"header", "metadata", "coll_perf", "p2p_perf", "proxy_trace", "dump_stats"})
RECORD_KEYS = ("coll_perf", "p2p_perf")
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
    call: CollectiveCall  # without ranks, and with the peer's rank in the communicator


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
    kernels = [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    starts = [time for event in kernels if _is_time(time := event.get("kernel_start_ts"))]
    stops = [time for event in kernels if _is_time(time := event.get("kernel_stop_ts"))]
    return (min(starts), max(stops)) if starts and len(starts) == len(stops) == len(kernels) else None


def _is_time(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


def is_inspector_log(source: TraceFile, max_lines: int) -> bool:
    """Return whether one of the first lines is a line of an Inspector log."""
    with source.open() as file:
        for number, raw in islice(_read_lines(file), max_lines):
            try:
                if not KEYS.isdisjoint(_parse_line(source.name, number, raw)):
                    return True
            except ImportProblemError:
                continue
    return False


def _read_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers. Lines that are too long are cut."""
    for number in count(1):
        raw = rest = file.readline(MAX_LINE_BYTES + 1)
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if not raw:
            return
        if raw.strip():
            yield number, raw


def _read_records(source: TraceFile, max_records: int) -> Iterator[_Record]:
    """Yield the records of valid lines. Invalid lines are left out with a note."""
    context: dict[str, Any] | None = None
    num_records = 0
    invalid = InvalidItems(source.name)
    with source.open() as file:
        for number, raw in _read_lines(file):
            try:
                line = _parse_line(source.name, number, raw)
                if "dump_stats" in line:
                    context = line
                    continue
                kind = next((key for key in RECORD_KEYS if key in line), None)
                if kind is None:
                    continue
                whole_line = line if "header" in line else {**(context or {}), **line}
                record = _parse_record(source.name, number, whole_line, kind)
            except ImportProblemError as error:
                invalid.add(error)
                continue
            num_records += 1
            if num_records > max_records:
                message = f"The file has more than {MAX_EVENTS:,} collectives."
                raise ImportProblemError(source.name, f"line {number}", message)
            yield record
    source.notes.extend(invalid.get_notes(num_records))


def _parse_line(file: str, number: int, raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_LINE_BYTES:
        raise ImportProblemError(file, f"line {number}", f"The log line is longer than {MAX_LINE_BYTES:,} bytes.")
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ImportProblemError(file, f"line {number}", f"The log line is not JSON: {error}") from error
    if not isinstance(line, dict):
        raise ImportProblemError(file, f"line {number}", "The log line is not a JSON object.")
    return line


def _parse_record(file: str, number: int, line: dict[str, Any], kind: str) -> _Record:
    for name in ("header", "metadata", kind):
        if not isinstance(line.get(name), dict):
            raise ImportProblemError(file, f"line {number}: {name}", "The field is missing or is not a JSON object.")
    header, metadata, performance = (
        EventFields(file, f"line {number}: {name}", line[name]) for name in ("header", "metadata", kind)
    )
    process = metadata.get_text("hostname")[:255], metadata.get_whole("pid")
    comm, name = header.get_text("id")[:60], header.get_text("comm_name", "unknown")[:60]
    comm_rank, comm_size = header.get_whole("rank", MAX_RANKS), header.get_whole("n_ranks", MAX_RANKS)
    if comm_rank >= comm_size:
        message = f"The rank is {comm_rank}, but `n_ranks` is {comm_size}. A rank below `n_ranks` is expected."
        raise ImportProblemError(file, f"line {number}: header.rank", message)
    dumped_us = metadata.get_whole("dump_timestamp_us", 2**62)
    short = kind.removesuffix("_perf")
    peer = performance.get_whole("p2p_peer", MAX_RANKS) if short == "p2p" else -1
    op = parse_op(performance.get_text(short))
    message_bytes = performance.get_whole(f"{short}_msg_size_bytes")
    duration_us = performance.get_whole(f"{short}_exec_time_us", 10**12)
    kernels = _get_kernel_times(performance.values)
    began, ended = kernels or (dumped_us - duration_us, dumped_us)
    call = CollectiveCall(
        step=0,
        rank=-1,
        axis=f"comm {name if name != 'unknown' else comm}"[:60],
        ranks=(),
        nth=0,
        sequence=performance.get_whole(f"{short}_sn"),
        op=op,
        issued=began / 1e6,
        blocked_s=None,
        ended=max(began, ended) / 1e6,
        payload_bytes=min(2**62, message_bytes * comm_size if op in SHARDED_OPS else message_bytes),
        peer=peer,
    )
    return _Record(process, comm, comm_rank, comm_size, kernels is not None, call)
