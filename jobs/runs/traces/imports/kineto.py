"""Read a trace of torch.profiler (Kineto's Chrome JSON): collectives, compute, and profiler steps.

On a GPU, collectives are the communication kernels, which carry the process group. On gloo, collectives are the
annotations of library threads, which have no group.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import ijson

from jobs.runs.traces.events import POINT_TO_POINT, CollectiveCall, WorkSpan
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

KEYS = frozenset({"schemaVersion", "traceEvents", "deviceProperties", "displayTimeUnit", "distributedInfo", "trace_id"})
STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
LIBRARY_EVENT = re.compile(r"(gloo|nccl|mpi|ucc|xccl):(.+)")
MAX_MERGED_GAP_US = 20.0  # shorter idle times between operators are not shown
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
COLLECTIVE_NAME = "Collective name"
COLLECTIVE_ARGS = (
    COLLECTIVE_NAME,
    "Process Group Name",
    "Process Group Ranks",
    "Process Group Description",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
)


class _KinetoEvent(NamedTuple):
    name: str
    began: float  # microseconds of the trace
    ended: float
    thread: str
    args: dict[str, Any]


class _SortedEvents(NamedTuple):
    """Hold events by kind, unsorted."""

    kernels: list[_KinetoEvent]
    launched: list[_KinetoEvent]  # on the CPU, when a collective was issued
    annotated: list[_KinetoEvent]  # by library threads
    operators: list[_KinetoEvent]
    on_gpu: list[_KinetoEvent]
    steps: list[tuple[float, int]]


def read_kineto(source: TraceFile) -> FileEvents:
    with source.open() as file:
        head = _read_header(file)
    distributed_info = head.get("distributedInfo")
    info: dict[str, Any] = distributed_info if isinstance(distributed_info, dict) else {}
    rank = (
        parse_whole(info["rank"], source.name, "distributedInfo.rank", 65_535)
        if "rank" in info
        else parse_rank(source.name)
    )
    if rank is None:
        raise ImportProblemError(
            source.name,
            "distributedInfo.rank",
            "The rank of this trace is unknown. End the file name with the rank number.",
        )
    base_ns = head.get("baseTimeNanoseconds") or 0
    base = parse_whole(base_ns, source.name, "baseTimeNanoseconds") / 1e9
    with source.open() as file:
        events = _read_events(source.name, file)
    events.steps.sort()
    converter = _EventConverter(source.name, rank, base, _parse_groups(source.name, info), events.steps)
    collectives = events.kernels or events.launched or events.annotated
    notes = []
    if collectives is events.annotated and collectives:
        notes.append("the trace has no process groups, so Meshboard assumes that every collective includes all ranks")
    if not collectives:
        notes.append("the trace has no collectives")
    return FileEvents(source.name, converter.calls(collectives), converter.spans(events), notes)


def _read_header(file: IO[bytes]) -> dict[str, Any]:
    """Return the small fields before the events. Later fields are not needed."""
    header: dict[str, Any] = {}
    builder, key = None, ""
    for prefix, event, value in ijson.parse(file, use_float=True):
        if prefix == "" and event == "map_key":
            key = value
            if key == "traceEvents":
                return header
            builder = ijson.ObjectBuilder()
        elif builder is not None and key and (prefix == key or prefix.startswith(f"{key}.")):
            builder.event(event, value)
            if prefix == key and event not in ("start_map", "start_array", "map_key"):
                header[key] = builder.value
    return header


def _read_events(file: str, opened: IO[bytes]) -> _SortedEvents:
    events = _SortedEvents([], [], [], [], [], [])
    num_events = 0
    for index, event in enumerate(ijson.items(opened, "traceEvents.item", use_float=True)):
        if not isinstance(event, dict):
            raise ImportProblemError(file, f"traceEvents[{index}]", "The event in the trace is not a JSON object.")
        if event.get("ph") != "X":
            continue
        num_events += _add_event(events, file, index, event)
        if num_events > MAX_EVENTS:
            raise ImportProblemError(file, "traceEvents", f"The file has more than {MAX_EVENTS:,} events.")
    return events


def _add_event(events: _SortedEvents, file: str, index: int, event: dict[str, Any]) -> bool:
    name, category = str(event.get("name", ""))[:200], event.get("cat")
    began, duration = event.get("ts"), event.get("dur", 0)
    for field, value in (("ts", began), ("dur", duration)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e16:
            raise ImportProblemError(
                file,
                f"traceEvents[{index}].{field}",
                f"The time is {str(value)[:60]!r}, which is not a number of microseconds.",
            )
    assert isinstance(began, int | float)
    args = event.get("args")
    args = (
        {key: args[key] for key in COLLECTIVE_ARGS if key in args}
        if isinstance(args, dict) and COLLECTIVE_NAME in args
        else {}
    )
    kineto_event = _KinetoEvent(name, began, began + duration, f"{event.get('pid')}/{event.get('tid')}", args)
    step = STEP.fullmatch(name)
    if step and category == "user_annotation":
        events.steps.append((kineto_event.began, int(step[1])))
    elif category in GPU_CATEGORIES:
        (events.kernels if COLLECTIVE_NAME in args else events.on_gpu).append(kineto_event)
    elif COLLECTIVE_NAME in args:
        events.launched.append(kineto_event)
    elif category == "user_annotation" and LIBRARY_EVENT.fullmatch(name):
        events.annotated.append(kineto_event)
    elif category == "cpu_op" and not name.startswith("c10d::"):
        events.operators.append(kineto_event)
    else:
        return False
    return True


def _parse_groups(file: str, info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = info.get("pg_config")
    rows = config if isinstance(config, list) else []
    return {
        str(row.get("pg_name")): parse_ranks(row.get("ranks"), file, "distributedInfo.pg_config.ranks")
        for row in rows
        if isinstance(row, dict)
    }


class _EventConverter:
    """Convert the events of one rank. `base`: Unix seconds at which the trace has microsecond 0."""

    def __init__(
        self, file: str, rank: int, base: float, groups: dict[str, tuple[int, ...]], steps: list[tuple[float, int]]
    ) -> None:
        self._file, self._rank, self._base, self._parse_groups = file, rank, base, groups
        self._starts, self._numbers = [began for began, _ in steps], [number for _, number in steps]

    def _get_step(self, began: float) -> int:
        place = bisect.bisect_right(self._starts, began) - 1
        return self._numbers[place] if place >= 0 else 0

    def _get_time(self, microseconds: float) -> float:
        return self._base + microseconds / 1e6

    def calls(self, events: list[_KinetoEvent]) -> list[CollectiveCall]:
        return list(self._convert(sorted(events, key=lambda event: event.began)))

    def _convert(self, events: list[_KinetoEvent]) -> Iterator[CollectiveCall]:
        num_calls: Counter[tuple[int, str, str]] = Counter()
        for event in events:
            op = parse_op(str(event.args.get(COLLECTIVE_NAME) or event.name))
            if op in ("wait", "init"):
                continue
            args, step = event.args, self._get_step(event.began)
            fields = ("Process Group Name", "Process Group Description")
            group, description = (parse_text(args.get(field), self._file, f"args.{field}") for field in fields)
            ranks = parse_ranks(args.get("Process Group Ranks", ""), self._file, "args.Process Group Ranks")
            axis = parse_axis(group, description) if args else "collectives"
            # Sends differ between ranks, and library threads without a group end in any order: count per operation.
            counted_op = "" if args and op not in POINT_TO_POINT else op
            num_calls[step, group, counted_op] += 1
            yield CollectiveCall(
                step=step,
                rank=self._rank,
                axis=axis,
                ranks=ranks or self._parse_groups.get(group, ()),
                nth=0 if args else _get_op_number(op),
                sequence=num_calls[step, group, counted_op],
                op=op,
                issued=self._get_time(event.began),
                blocked_s=0.0,
                ended=self._get_time(event.ended),
                payload_bytes=_get_payload_bytes(args),
                peer=-1,
            )

    def spans(self, sorted_events: _SortedEvents) -> list[WorkSpan]:
        """Return merged compute intervals: of the GPU, or else of the thread with the most operators."""
        events = sorted_events.on_gpu
        if not events and sorted_events.operators:
            threads: dict[str, list[_KinetoEvent]] = defaultdict(list)
            for event in sorted_events.operators:
                threads[event.thread].append(event)
            events = max(threads.values(), key=len)
        spans: list[WorkSpan] = []
        for began, ended in _merge_intervals(events):
            spans.append(
                WorkSpan(
                    self._get_step(began), self._rank, "compute", -1, -1, self._get_time(began), self._get_time(ended)
                )
            )
        return spans


def _merge_intervals(events: list[_KinetoEvent]) -> Iterator[tuple[float, float]]:
    began, ended = 0.0, -1.0
    for event in sorted(events, key=lambda event: event.began):
        if ended >= began and event.began <= ended + MAX_MERGED_GAP_US:
            ended = max(ended, event.ended)
            continue
        if ended >= began:
            yield began, ended
        began, ended = event.began, event.ended
    if ended >= began:
        yield began, ended


def _get_op_number(op: str) -> int:
    """Return a number for a library's operation that is equal on every rank."""
    return int.from_bytes(op.encode()[:6], "big")


def _get_payload_bytes(args: dict[str, Any]) -> int:
    """Return the bytes of the larger of input and output, which is the full buffer."""
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    num_elements = max((count for count in counts if isinstance(count, int) and 0 <= count < 2**48), default=0)
    return num_elements * get_element_bytes(args.get("dtype", ""))
