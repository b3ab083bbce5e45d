"""Read traces of torch.profiler (Kineto): collectives, compute, and copies of each profiler step.

With a GPU, a collective is its communication kernel. A kernel belongs to the step that launched it, because kernels run
later than their launch. With gloo, a collective is the annotation of the library's thread, which has no process group.
A launch on the CPU has no end, so its duration is unknown.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import ulp
from typing import Any, Final

from contracts.telemetry.items import MAX_UNIX_S
from jobs.core.text import is_storable
from jobs.runs.traces.imports.common import (
    MAX_LISTED_RANKS,
    MAX_RANKS,
    MAX_TEXT_LENGTH,
    FileEvents,
    ImportProblemError,
    format_count,
    parse_axis,
    parse_rank,
    parse_ranks,
    parse_whole,
)
from jobs.runs.traces.imports.json_stream import JsonReader
from jobs.runs.traces.imports.kineto_events import (
    CPU_LIBRARIES,
    UNKNOWN_ID,
    Annotation,
    CollectiveArgs,
    DeviceEvent,
    Intervals,
    KinetoEvents,
    StepMark,
)
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import CollectiveCall, WorkSpan

MAX_SPANS_PER_FILE: Final = 100_000
MERGED_GAPS_US: Final = (0.0, 1.0, 5.0, 20.0, 100.0, 1e3, 1e4, 1e5)
UNKNOWN_GROUP: Final = "collectives"
UNKNOWN_OP: Final = "collective"
MIN_RESOLUTION_S: Final = 1e-12


def read_kineto(source: TraceFile, default_rank: int) -> FileEvents:
    """Read a trace. `default_rank`: the rank if the trace and the file name contain no rank."""
    events, info, base_ns = KinetoEvents(source), {}, 0
    with source.open() as file:
        index = 0
        for key, value in JsonReader(source, file).read():
            if key == "traceEvents":
                events.add(index, value)
                index += 1
            elif key == "distributedInfo" and isinstance(value, dict):
                info = value
            elif key == "baseTimeNanoseconds":
                base_ns = _parse_optional(source, key, value) or 0
    events.add_notes()
    rank = _find_rank(source, info, default_rank)
    return _Converter(source, events, rank, base_ns / 1e9, info).convert()


def _parse_optional(source: TraceFile, field: str, value: object, maximum: int = 2**63 - 1) -> int | None:
    """Return a whole number, or None for a missing or invalid value, with a note."""
    if value is None:
        return None
    try:
        return parse_whole(value, source.name, field, maximum)
    except ImportProblemError as error:
        source.add_note(f"{field} is left out: {error.message.rstrip('.')}")
        return None


def _find_rank(source: TraceFile, info: dict[str, Any], default_rank: int) -> int:
    rank = _parse_optional(source, "distributedInfo.rank", info.get("rank"), MAX_RANKS - 1)
    if rank is not None:
        return rank
    named = parse_rank(source.name)
    if named is not None:
        source.add_note(f"the trace does not contain its rank, so rank {named} comes from the file name")
        return named
    source.add_note(f"the trace and the file name do not contain the rank, so the file is shown as rank {default_rank}")
    return default_rank


class _StepFinder:
    """Find the step of an event from its launch. `num_before`, `num_by_time`: events without a launch in a step."""

    def __init__(self, events: KinetoEvents) -> None:
        self._launches = events.launches
        on_cpu = sorted(mark for mark in events.steps if mark.stream < 0)
        self._by_stream: dict[int, list[StepMark]] = defaultdict(list)
        for mark in sorted(mark for mark in events.steps if mark.stream >= 0):
            self._by_stream[mark.stream].append(mark)
        self._has_cpu_steps = bool(on_cpu)
        self._steps = on_cpu or sorted(mark for marks in self._by_stream.values() for mark in marks)
        self._begins = [mark.began for mark in self._steps]
        self._stream_begins = {stream: [mark.began for mark in marks] for stream, marks in self._by_stream.items()}
        self._has_several_steps = len({mark.number for mark in self._steps}) > 1
        self.num_before = self.num_by_time = 0

    @property
    def step_before(self) -> int:
        """Return the number of the step before the first recorded step, 0 for the first step of a run."""
        return max(0, min((mark.number for mark in self._steps), default=1) - 1)

    def find_at(self, time: float) -> int:
        """Return the step that runs on the CPU at a time."""
        if not self._steps:
            return 0
        index = bisect.bisect_right(self._begins, time) - 1
        if index < 0:
            self.num_before += 1
            return self.step_before
        return self._steps[index].number

    def find(self, began: float, stream: int, correlation: int, external: int) -> int:
        """Return the step that launched a device event."""
        if not self._steps:
            return 0
        launch = self._launches.correlations.get(correlation) or self._launches.external.get(external)
        if launch is not None and self._has_cpu_steps:
            return self.find_at(launch[0])
        number = self._find_on_stream(began, stream)
        if number is not None:
            return number
        first = self._launches.correlations.first
        if correlation != UNKNOWN_ID and first is not None and correlation < first:
            self.num_before += 1
            return self.step_before
        numbers = {self._find_on_stream(began, other) for other in self._by_stream} - {None}
        if len(numbers) == 1 and (number := numbers.pop()) is not None:
            return number
        self.num_by_time += self._has_several_steps
        return self.find_at(began)

    def _find_on_stream(self, began: float, stream: int) -> int | None:
        marks = self._by_stream.get(stream)
        if not marks:
            return None
        index = bisect.bisect_right(self._stream_begins[stream], began) - 1
        return marks[index].number if index >= 0 and began <= marks[index].ended else None


class _Converter:
    """Convert the events of one rank. `base`: Unix seconds at which the trace has microsecond 0."""

    def __init__(self, source: TraceFile, events: KinetoEvents, rank: int, base: float, info: dict[str, Any]) -> None:
        self._source, self._events, self._rank, self._base = source, events, rank, base
        self._world_size = _parse_optional(source, "distributedInfo.world_size", info.get("world_size"), MAX_RANKS) or 0
        self._groups = self._parse_groups(info)
        self._only_group = _find_only_group(info)
        self._ranks: dict[CollectiveArgs, tuple[int, ...]] = {}
        devices = [*events.collectives]
        correlations = {event.correlation for event in devices}
        external = {event.external for event in devices}
        for intervals in (events.kernels, events.copies):
            correlations.update(intervals.correlations)
            external.update(intervals.external)
        events.launches.resolve(correlations - {UNKNOWN_ID}, external - {UNKNOWN_ID})
        self._steps = _StepFinder(events)
        self._num_invalid_times = 0
        self._rounding_error = 0.0  # seconds

    def convert(self) -> FileEvents:
        device_calls = self._convert_kernels()
        calls = [call for call in [*device_calls, *self._convert_annotations()] if self._is_valid_time(call[0].issued)]
        spans = [span for span in self._convert_spans() if self._is_valid_time(span.began)]
        self._add_notes([call for call, _ in calls])
        groups = [group for _, group in calls]
        return FileEvents(self._source.name, [call for call, _ in calls], spans, [], groups)

    def _is_valid_time(self, time: float) -> bool:
        is_valid = 0 <= time < MAX_UNIX_S
        self._num_invalid_times += not is_valid
        return is_valid

    def _add_notes(self, calls: list[CollectiveCall]) -> None:
        add = self._source.add_note
        if not calls:
            add("the trace has no collectives")
        if num := sum(call.payload_bytes is None for call in calls):
            add(f"sizes are missing for {num:,} of {format_count(len(calls), 'collective')}, so the bytes are unknown")
        if self._num_invalid_times:
            add(f"{format_count(self._num_invalid_times, 'event')} outside the supported times are left out")
        if self._steps.num_before:
            step = self._steps.step_before
            num_before = format_count(self._steps.num_before, "event")
            add(f"{num_before} launched before the first recorded step are shown in step {step}")
        if self._steps.num_by_time:
            num_by_time = format_count(self._steps.num_by_time, "kernel")
            add(f"the launch of {num_by_time} is not recorded, so their step is the step in which they ran")

    def _get_time(self, microseconds: float) -> float:
        return self._base + microseconds / 1e6

    def _parse_groups(self, info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        groups = {}
        config = info.get("pg_config")
        for row in config if isinstance(config, list) else []:
            if isinstance(row, dict) and isinstance(row.get("pg_name"), str | int):
                groups[str(row["pg_name"])] = self._parse_ranks(row.get("ranks"), "distributedInfo.pg_config.ranks")
        return groups

    def _parse_ranks(self, value: object, field: str) -> tuple[int, ...]:
        try:
            return parse_ranks(value, self._source.name, field)
        except ImportProblemError as error:
            self._source.add_note(f"{field} is left out: {error.message.rstrip('.')}")
            return ()

    def _get_group_ranks(self, args: CollectiveArgs) -> tuple[int, ...]:
        if args not in self._ranks:
            ranks = self._parse_ranks(args.ranks, "args.Process Group Ranks") or self._groups.get(args.group, ())
            if not ranks and args.stride is not None:
                first, stride, size = args.stride
                is_valid = first >= 0 and stride > 0 and 0 < size <= MAX_RANKS and first + stride * size <= 2**31
                ranks = tuple(range(first, first + stride * size, stride)) if is_valid else ()
            self._ranks[args] = ranks
        return self._ranks[args]

    def _convert_kernels(self) -> list[tuple[CollectiveCall, str]]:
        kernels = sorted(self._events.collectives, key=lambda kernel: kernel.began)
        finder = _AnnotationFinder(self._events)
        annotations = [finder.find(kernel) for kernel in kernels]
        num_kernels: dict[Annotation | None, int] = defaultdict(int)
        for annotation in annotations:
            num_kernels[annotation] += 1
        overlap = _Overlap(self._events)
        calls = []
        for kernel, annotation in zip(kernels, annotations, strict=True):
            args, sequence = kernel.args, kernel.sequence
            if annotation is not None:
                sequence = annotation.sequence if sequence is None else sequence
                if args is None and annotation.args is not None:
                    # Several kernels of one launch divide its bytes in an unknown way.
                    has_bytes = num_kernels[annotation] == 1
                    args = annotation.args if has_bytes else annotation.args._replace(payload_bytes=None)
            op = args.op if args else kernel.op or (annotation.op if annotation else UNKNOWN_OP)
            args = args or self._only_group
            step = self._steps.find(kernel.began, kernel.stream, kernel.correlation, kernel.external)
            exposed_us = kernel.duration - overlap.get_overlap(kernel)
            calls.append(self._make_call(step, op, kernel.began, kernel.duration, args, sequence, exposed_us))
        self._note_unknown_groups([group for _, group in calls])
        return calls

    def _note_unknown_groups(self, groups: Iterable[str]) -> None:
        if num := sum(group == "" for group in groups):
            self._source.add_note(
                f"the process group of {format_count(num, 'collective')} is not recorded, "
                "so Meshboard assumes that each of them includes all ranks"
            )

    def _make_call(
        self,
        step: int,
        op: str,
        began: float,
        duration: float | None,
        args: CollectiveArgs | None,
        sequence: int | None,
        exposed_us: float | None,
    ) -> tuple[CollectiveCall, str]:
        """Return a call and the name of its process group, "" if unknown."""
        issued = self._get_time(began)
        payload = args.payload_bytes if args else 0 if op == "barrier" else None
        call = CollectiveCall(
            step=step,
            rank=self._rank,
            axis=parse_axis(args.group, args.description) if args else UNKNOWN_GROUP,
            ranks=self._get_group_ranks(args) if args else self._get_world(),
            nth=0,
            sequence=UNKNOWN_ID if sequence is None else sequence,
            op=op,
            issued=issued,
            blocked_s=None if exposed_us is None else exposed_us / 1e6,
            ended=None if duration is None else self._add_duration(issued, duration),
            payload_bytes=payload,
            peer=-1,
        )
        return call, f"group {args.group}" if args else ""

    def _add_duration(self, issued: float, microseconds: float) -> float:
        """Return the end of a collective. Seconds since 1970 have a resolution of 0.24 microseconds as floats.

        Each end carries the rounding error of the ends before. Sums of durations are therefore exact.
        """
        exact = microseconds / 1e6 + self._rounding_error
        resolution = max(ulp(issued), MIN_RESOLUTION_S)
        ended = issued + max(0, round(exact / resolution)) * resolution
        self._rounding_error = exact - (ended - issued)
        return ended

    def _get_world(self) -> tuple[int, ...]:
        num_events = len(self._events.collectives) + len(self._events.annotations)
        return tuple(range(self._world_size)) if self._world_size * num_events * 8 < MAX_LISTED_RANKS else ()

    def _convert_annotations(self) -> list[tuple[CollectiveCall, str]]:
        """Convert collectives of CPU libraries, and launches if the trace has no communication kernels."""
        annotations = sorted(self._events.annotations, key=lambda annotation: annotation.began)
        on_cpu = [annotation for annotation in annotations if annotation.library in CPU_LIBRARIES]
        of_device = [annotation for annotation in annotations if annotation.library not in CPU_LIBRARIES | {""}]
        launched: list[Annotation] = []
        if not self._events.collectives:
            with_args = [annotation for annotation in annotations if not annotation.library]
            launched = of_device if on_cpu else with_args or of_device
        if launched:
            self._source.add_note(
                f"the trace has launches of {format_count(len(launched), 'collective')} but no communication kernels, "
                "so the durations are unknown"
            )
        calls = []
        for annotation in sorted([*on_cpu, *launched], key=lambda annotation: annotation.began):
            duration = annotation.ended - annotation.began if annotation.library in CPU_LIBRARIES else None
            step = self._steps.find_at(annotation.began)
            args = annotation.args, annotation.sequence
            calls.append(self._make_call(step, annotation.op, annotation.began, duration, *args, None))
        self._note_unknown_groups([group for _, group in calls])
        return calls

    def _convert_spans(self) -> Iterator[WorkSpan]:
        """Yield merged intervals of compute and copies: of the GPU, or else of the thread with the most operators."""
        rows: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        if self._events.has_device_events:
            for work, columns in (("compute", self._events.kernels), ("copy", self._events.copies)):
                self._add_rows(rows, work, columns)
        elif self._events.operators:
            self._source.add_note("the trace has no device events, so compute is the time of operators on the CPU")
            began, ended = max(self._events.operators.values(), key=lambda columns: len(columns[0]))
            for interval in zip(began, ended, strict=True):
                rows["compute", self._steps.find_at(interval[0])].append(interval)
        for intervals in rows.values():
            intervals.sort()
        for gap in MERGED_GAPS_US:
            merged = {key: list(_merge_intervals(intervals, gap)) for key, intervals in rows.items()}
            if sum(map(len, merged.values())) <= MAX_SPANS_PER_FILE:
                break
        if gap:
            self._source.add_note(f"idle times below {gap:,.0f} microseconds between kernels are not shown")
        for (work, step), intervals in merged.items():
            for first, last in intervals:
                start = self._get_time(first)
                yield WorkSpan(step, self._rank, work, -1, -1, start, start + (last - first) / 1e6)

    def _add_rows(self, rows: dict[tuple[str, int], list[tuple[float, float]]], work: str, columns: Intervals) -> None:
        ids = zip(columns.streams, columns.correlations, columns.external, strict=True)
        for began, ended, (stream, correlation, external) in zip(columns.began, columns.ended, ids, strict=True):
            rows[work, self._steps.find(began, stream, correlation, external)].append((began, ended))


def _find_only_group(info: dict[str, Any]) -> CollectiveArgs | None:
    """Return the process group of all collectives if the run has only one, without an operation and bytes."""
    config = info.get("pg_config")
    if not isinstance(config, list) or len(config) != 1 or not isinstance(config[0], dict):
        return None
    name, description = (config[0].get(key) for key in ("pg_name", "pg_desc"))
    if not isinstance(name, str) or not is_storable(name):
        return None
    text = description if isinstance(description, str) and is_storable(description) else ""
    return CollectiveArgs("", name[:MAX_TEXT_LENGTH], text[:MAX_TEXT_LENGTH], "", None, None)


class _AnnotationFinder:
    """Find the CPU annotation that launched a kernel, by External id or by the time of the launch."""

    def __init__(self, events: KinetoEvents) -> None:
        self._launches = events.launches
        self._by_external: dict[int, Annotation] = {}
        self._by_thread: dict[int, list[Annotation]] = defaultdict(list)
        for annotation in sorted(events.annotations, key=lambda annotation: annotation.began):
            if annotation.external != UNKNOWN_ID:
                self._by_external.setdefault(annotation.external, annotation)
            self._by_thread[annotation.thread].append(annotation)
        self._begins = {thread: [one.began for one in rows] for thread, rows in self._by_thread.items()}

    def find(self, kernel: DeviceEvent) -> Annotation | None:
        if kernel.external in self._by_external:
            return self._by_external[kernel.external]
        launch = self._launches.correlations.get(kernel.correlation) or self._launches.external.get(kernel.external)
        if launch is None or launch[1] not in self._by_thread:
            return None
        time, thread = launch
        rows = self._by_thread[thread]
        after = bisect.bisect_right(self._begins[thread], time)
        # The operator with the arguments encloses the annotation of the library.
        enclosing = [one for one in rows[max(0, after - 3) : after] if time <= one.ended]
        return next((one for one in enclosing if one.args), enclosing[-1] if enclosing else None)


class _Overlap:
    """Compute how long compute kernels of the device run during a communication kernel."""

    def __init__(self, events: KinetoEvents) -> None:
        self._get_device = events.get_device
        by_device: dict[str, list[tuple[float, float]]] = defaultdict(list)
        if events.collectives:
            kernels = events.kernels
            for began, ended, stream in zip(kernels.began, kernels.ended, kernels.streams, strict=True):
                by_device[self._get_device(stream)].append((began, ended))
        self._busy = {device: _BusyTime(intervals) for device, intervals in by_device.items()}

    def get_overlap(self, kernel: DeviceEvent) -> float:
        """Return the overlapped microseconds of a communication kernel."""
        busy = self._busy.get(self._get_device(kernel.stream))
        if busy is None:
            return 0.0
        return busy.until(kernel.began + kernel.duration) - busy.until(kernel.began)


class _BusyTime:
    """Sum the union of intervals up to a time."""

    def __init__(self, intervals: list[tuple[float, float]]) -> None:
        merged = list(_merge_intervals(sorted(intervals), 0.0))
        self._begins = [began for began, _ in merged]
        self._lengths = [ended - began for began, ended in merged]
        self._totals = [0.0, *accumulate(self._lengths)]

    def until(self, time: float) -> float:
        index = bisect.bisect_right(self._begins, time) - 1
        if index < 0:
            return 0.0
        return self._totals[index] + min(self._lengths[index], time - self._begins[index])


def _merge_intervals(intervals: list[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    """Merge sorted intervals with gaps of at most `gap`."""
    began, ended = 0.0, -1.0
    for first, last in intervals:
        if ended >= began and first <= ended + gap:
            ended = max(ended, last)
            continue
        if ended >= began:
            yield began, ended
        began, ended = first, last
    if ended >= began:
        yield began, ended
