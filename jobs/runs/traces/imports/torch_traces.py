"""Read traces of PyTorch: dumps of its flight recorder, and traces of torch.profiler (Kineto's Chrome JSON).

A flight recorder dump is a pickle or JSON (torch/csrc/distributed/c10d/FlightRecorder). It has the group, the sequence
number, and the issue time of each collective, and with NCCL its begin and end. With gloo, the dump has no ends, no
sends, and no ranks of groups.

A Kineto trace has collectives, compute, and profiler steps. On a GPU, collectives are the communication kernels, which
carry the process group. On gloo, collectives are the annotations of library threads, which have no group.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod
from typing import IO, Any, NamedTuple

import ijson

from contracts.safe_unpickle import MAX_PLAIN_BYTES, RefusedPickleError, read_plain_pickle
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    EventFields,
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
from jobs.runs.traces.traced_steps import POINT_TO_POINT, CollectiveCall, WorkSpan

FLIGHT_RECORDER_KEYS = frozenset(
    {"version", "entries", "pg_config", "pg_status", "comm_lib_version", "nccl_version", "rank"}
)
KINETO_KEYS = frozenset(
    {"schemaVersion", "traceEvents", "deviceProperties", "displayTimeUnit", "distributedInfo", "trace_id"}
)
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


def read_flight_recorder_json(source: TraceFile, first_events: dict[str, str]) -> FileEvents:
    """Read a JSON dump, one entry at a time. `first_events`: the result of `check_json_bounds`."""
    if first_events.get("entries") != "start_array":
        raise ImportProblemError(source.name, "entries", NO_ENTRIES)
    with source.open() as file:
        groups = next(ijson.items(file, "pg_config", use_float=True), None)
    with source.open() as file:
        return _convert_dump(source.name, ijson.items(file, "entries.item", use_float=True), groups)


def _convert_dump(file: str, entries: Iterable[Any], groups: Any) -> FileEvents:
    rank = parse_rank(file)
    if rank is None:
        message = "The rank of this dump is unknown. End the file name with the rank number."
        raise ImportProblemError(file, "name", message)
    groups = groups if isinstance(groups, dict) else {}
    calls = list(islice(_convert_entries(file, rank, entries, groups), MAX_EVENTS + 1))
    if len(calls) > MAX_EVENTS:
        raise ImportProblemError(file, "entries", f"The file has more than {MAX_EVENTS:,} events.")
    has_open_ends = any(call.ended is None for call in calls)
    return FileEvents(
        file, calls, [], ["collectives without a recorded end time are shown as points"] if has_open_ends else []
    )


def _convert_entries(file: str, rank: int, entries: Iterable[Any], groups: Any) -> Iterator[CollectiveCall]:
    ranks_cache: dict[int, tuple[int, ...]] = {}  # by the id of the parsed list or text, which entries share
    for index, entry in enumerate(entries):
        field = f"entries[{index}]"
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
        yield CollectiveCall(
            step=0,
            rank=rank,
            axis=parse_axis(group, description),
            ranks=ranks,
            nth=0,
            sequence=fields.get_whole("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"),
            op=op,
            issued=began / 1e9,
            blocked_s=0.0,
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


def _get_buffer_bytes(entry: dict[str, Any]) -> int:
    """Return the bytes of the larger of input and output, which is the full buffer."""
    buffers = [(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    sizes = [
        sum(_get_tensor_bytes(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=False))
        for shapes, dtypes in buffers
        if isinstance(shapes, list) and isinstance(dtypes, list)
    ]
    return min(2**62, max(sizes, default=0))


def _get_tensor_bytes(shape: object, dtype: object) -> int:
    if not isinstance(shape, list):
        return 0
    count = prod(size if isinstance(size, int) and 0 <= size < 2**48 else 0 for size in shape[:16])
    return min(2**62, count * get_element_bytes(dtype))


STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
LIBRARY_EVENT = re.compile(r"(gloo|nccl|mpi|ucc|xccl):(.+)")
MAX_MERGED_GAP_US = 20.0  # shorter idle times between operators are not shown
GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
COLLECTIVE_NAME = "Collective name"
COLLECTIVE_ARGS = (
    *(COLLECTIVE_NAME, "Process Group Name", "Process Group Ranks", "Process Group Description"),
    *("In msg nelems", "Out msg nelems", "dtype"),
)


class _KinetoEvent(NamedTuple):
    name: str
    began: float  # microseconds of the trace
    ended: float
    thread: str
    args: dict[str, Any]


class _KinetoEvents(NamedTuple):
    """Hold events by kind, unsorted."""

    kernels: list[_KinetoEvent]
    launched: list[_KinetoEvent]  # on the CPU, when a collective was issued
    annotated: list[_KinetoEvent]  # by library threads
    operators: list[_KinetoEvent]
    on_gpu: list[_KinetoEvent]
    steps: list[tuple[float, int]]


def read_kineto(source: TraceFile) -> FileEvents:
    with source.open() as file:
        header = _read_header(file)
    distributed_info = header.get("distributedInfo")
    info: dict[str, Any] = distributed_info if isinstance(distributed_info, dict) else {}
    field = "distributedInfo.rank"
    rank = parse_whole(info["rank"], source.name, field, 65_535) if "rank" in info else parse_rank(source.name)
    if rank is None:
        message = "The rank of this trace is unknown. End the file name with the rank number."
        raise ImportProblemError(source.name, field, message)
    base_ns = parse_whole(header.get("baseTimeNanoseconds") or 0, source.name, "baseTimeNanoseconds")
    with source.open() as file:
        events = _read_events(source.name, file)
    events.steps.sort()
    converter = _EventConverter(source.name, rank, base_ns / 1e9, _parse_groups(source.name, info), events.steps)
    collectives = events.kernels or events.launched or events.annotated
    notes = []
    if collectives is events.annotated and collectives:
        notes.append("the trace has no process groups, so Meshboard assumes that every collective includes all ranks")
    if not collectives:
        notes.append("the trace has no collectives")
    return FileEvents(source.name, list(converter.convert_calls(collectives)), converter.convert_spans(events), notes)


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


def _read_events(file: str, opened: IO[bytes]) -> _KinetoEvents:
    events = _KinetoEvents([], [], [], [], [], [])
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


def _add_event(events: _KinetoEvents, file: str, index: int, event: dict[str, Any]) -> bool:
    """Add an event to the list of its kind. Return False for an event that is not imported."""
    name, category = str(event.get("name", ""))[:200], event.get("cat")
    began, duration = event.get("ts"), event.get("dur", 0)
    for field, value in (("ts", began), ("dur", duration)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e16:
            message = f"The time is {str(value)[:60]!r}, which is not a number of microseconds."
            raise ImportProblemError(file, f"traceEvents[{index}].{field}", message)
    assert isinstance(began, int | float)
    all_args: Any = event.get("args")
    is_collective = isinstance(all_args, dict) and COLLECTIVE_NAME in all_args
    args = {key: all_args[key] for key in COLLECTIVE_ARGS if key in all_args} if is_collective else {}
    kineto_event = _KinetoEvent(name, began, began + duration, f"{event.get('pid')}/{event.get('tid')}", args)
    step = STEP.fullmatch(name)
    if step and category == "user_annotation":
        events.steps.append((kineto_event.began, int(step[1])))
    elif category in GPU_CATEGORIES:
        (events.kernels if is_collective else events.on_gpu).append(kineto_event)
    elif is_collective:
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
    return {
        str(row.get("pg_name")): parse_ranks(row.get("ranks"), file, "distributedInfo.pg_config.ranks")
        for row in (config if isinstance(config, list) else [])
        if isinstance(row, dict)
    }


class _EventConverter:
    """Convert the events of one rank. `base`: Unix seconds at which the trace has microsecond 0."""

    def __init__(
        self, file: str, rank: int, base: float, groups: dict[str, tuple[int, ...]], steps: list[tuple[float, int]]
    ) -> None:
        self._file, self._rank, self._base, self._groups, self._steps = file, rank, base, groups, steps

    def _get_step(self, began: float) -> int:
        index = bisect.bisect_right(self._steps, began, key=lambda step: step[0]) - 1
        return self._steps[index][1] if index >= 0 else 0

    def _get_time(self, microseconds: float) -> float:
        return self._base + microseconds / 1e6

    def convert_calls(self, events: list[_KinetoEvent]) -> Iterator[CollectiveCall]:
        num_calls: Counter[tuple[int, str, str]] = Counter()
        for event in sorted(events, key=lambda event: event.began):
            op = parse_op(str(event.args.get(COLLECTIVE_NAME) or event.name))
            if op in ("wait", "init"):
                continue
            args, step = event.args, self._get_step(event.began)
            fields = EventFields(self._file, "args", args)
            group, description = fields.get_text("Process Group Name"), fields.get_text("Process Group Description")
            ranks = parse_ranks(args.get("Process Group Ranks", ""), self._file, "args.Process Group Ranks")
            # Sends differ between ranks, and library threads without a group end in any order: count per operation.
            counted_op = "" if args and op not in POINT_TO_POINT else op
            num_calls[step, group, counted_op] += 1
            yield CollectiveCall(
                step=step,
                rank=self._rank,
                axis=parse_axis(group, description) if args else "collectives",
                ranks=ranks or self._groups.get(group, ()),
                nth=0 if args else int.from_bytes(op.encode()[:6], "big"),  # equal on every rank
                sequence=num_calls[step, group, counted_op],
                op=op,
                issued=self._get_time(event.began),
                blocked_s=0.0,
                ended=self._get_time(event.ended),
                payload_bytes=_get_message_bytes(args),
                peer=-1,
            )

    def convert_spans(self, kineto_events: _KinetoEvents) -> list[WorkSpan]:
        """Return merged compute intervals: of the GPU, or else of the thread with the most operators."""
        events = kineto_events.on_gpu
        if not events and kineto_events.operators:
            threads: dict[str, list[_KinetoEvent]] = defaultdict(list)
            for event in kineto_events.operators:
                threads[event.thread].append(event)
            events = max(threads.values(), key=len)
        return [
            WorkSpan(self._get_step(began), self._rank, "compute", -1, -1, self._get_time(began), self._get_time(ended))
            for began, ended in _merge_intervals(events)
        ]


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


def _get_message_bytes(args: dict[str, Any]) -> int:
    """Return the bytes of the larger of input and output, which is the full buffer."""
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    num_elements = max((count for count in counts if isinstance(count, int) and 0 <= count < 2**48), default=0)
    return num_elements * get_element_bytes(args.get("dtype", ""))
