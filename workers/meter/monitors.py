"""What the thread of the exporter polls: step timelines, stalls of the training thread, and resource usage."""

from __future__ import annotations

import linecache
import os
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType

import msgpack
import torch

from contracts.telemetry.items import (
    CollectiveCalls,
    ComputeSpans,
    GaugeItem,
    GroupProgress,
    StallItem,
    TimelineItem,
    find_user_frame,
)
from workers.meter.collectives import Collective, GroupState, StepTrace
from workers.meter.rank_exit import format_message
from workers.meter.recorder import Recorder
from workers.meter.work import MAIN_THREAD
from workers.step_sampling import StepSampler

GAUGE_PERIOD_S = 5.0
STALL_S = 2.0  # without progress, and between two reports
MAX_STALL_GROUPS = 256
MAX_GROUPS_WITH_RECENT_CALLS = 16  # of them, which may have 16 calls of 100 bytes each
MAX_STACK_FRAMES = 60  # the innermost
MAX_SOURCE_CHARS = 200
MAX_ERROR_CHARS = 500
MAX_FRAME_NAME_CHARS = 300  # the end of a file name
STATM, STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_HOST_BYTES_PER_S = 2 * 2**20  # all ranks of a host, half of what its supervisor reads
MAX_RANK_BYTES_PER_S = 128 * 2**10
MAX_ITEM_BYTES = 192 * 2**10
MAX_TIMELINE_GROUPS = 256
MAX_WAIT_FOR_END_S = 1.0  # a collective that ends later after its step is sent without its end


class ResourceMonitor:
    """Report the CPU and memory of a rank. The first poll covers the time since the creation."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._measured_s, self._cpu_s = time.monotonic(), time.process_time()
        self._due_s = 0.0

    def poll(self) -> GaugeItem | None:
        """Return the usage, or None until GAUGE_PERIOD_S have passed."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + GAUGE_PERIOD_S
        item = GaugeItem(kind="gauge", rank=self._rank, time=time.time())
        cpu_s = time.process_time()
        if now_s > self._measured_s:
            item["cpu"] = (cpu_s - self._cpu_s) / (now_s - self._measured_s)
        self._measured_s, self._cpu_s = now_s, cpu_s
        item["resident_bytes"] = int(STATM.read_text().split()[1]) * PAGE_BYTES
        if torch.cuda.is_initialized():
            # Sum over all devices, because this thread does not know the device of the training thread.
            devices = range(torch.cuda.device_count())
            item["allocated_bytes"] = sum(map(torch.cuda.memory_allocated, devices))
            item["reserved_bytes"] = sum(map(torch.cuda.memory_reserved, devices))
        return item


class PeakMonitor:
    """Report the peak memory of a script when it grows: of torch's allocator on a GPU, or else of the process."""

    def __init__(self, rank: int) -> None:
        self._rank, self._peak_bytes = rank, 0
        self._uses_device = False

    def poll(self) -> GaugeItem | None:
        if torch.cuda.is_initialized() and not self._uses_device:
            self._uses_device, self._peak_bytes = True, 0
        peak_bytes = self._measure()
        if peak_bytes <= self._peak_bytes:
            return None
        self._peak_bytes = peak_bytes
        return GaugeItem(kind="gauge", rank=self._rank, time=time.time(), peak_bytes=peak_bytes)

    def _measure(self) -> int:
        if self._uses_device:
            return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        peak_kib, file_kib, shared_kib = (int(fields[name].split()[0]) for name in ("VmHWM", "RssFile", "RssShmem"))
        return (peak_kib - file_kib - shared_kib) * 1024


class StallMonitor:
    """Report a rank without progress. It runs outside the training thread, which may be blocked in native code."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._reported_s = 0.0
        self._is_stalled = False

    def poll(self) -> StallItem | None:
        """Return a report every STALL_S during a stall, once when it ends, and None otherwise."""
        now_s = time.perf_counter()
        stalled_s = now_s - self._recorder.last_progress_s
        if stalled_s < STALL_S:
            was_stalled, self._is_stalled = self._is_stalled, False
            return get_stall(self._recorder, 0.0) if was_stalled else None
        if self._is_stalled and now_s - self._reported_s < STALL_S:
            return None
        self._is_stalled, self._reported_s = True, now_s
        return get_stall(self._recorder, stalled_s)


def get_stall(recorder: Recorder, stalled_s: float) -> StallItem:
    """Return the progress of a rank in its groups, and the stack of its training thread."""
    return _build_stall(recorder, stalled_s, _format_stack(sys._current_frames().get(MAIN_THREAD or 0)))


def get_last_report(recorder: Recorder, error: BaseException | None) -> StallItem:
    """Return the progress of a rank that ends by itself, with its uncaught exception."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_STACK_FRAMES:] if error is not None else []
    lines = [_format_frame(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    item = _build_stall(recorder, 0.0, lines)
    item["ended"] = "" if error is None else _format_error(error)
    return item


def _build_stall(recorder: Recorder, stalled_s: float, stack: list[str]) -> StallItem:
    groups = [group for group in recorder.groups.all() if group.issued or group.p2p_counts]
    groups.sort(key=lambda group: not group.in_flight)  # groups with operations in flight come first
    progress = [_get_group_progress(recorder, group) for group in groups[:MAX_STALL_GROUPS]]
    for one, group in zip(progress[:MAX_GROUPS_WITH_RECENT_CALLS], groups, strict=False):
        one["recent"] = [format_call(call) for call in list(group.recent)]
    return StallItem(
        kind="standing",
        rank=recorder.rank,
        time=time.time(),
        step=recorder.completed_steps,
        phase=recorder.phase,
        still=stalled_s,
        groups=progress,
        stack=stack,
        source=_read_source(find_user_frame(stack)),
    )


def _get_group_progress(recorder: Recorder, group: GroupState) -> GroupProgress:
    issued, ended, oldest = recorder.get_progress(group)
    progress = GroupProgress(group=recorder.get_group_ranks(group), issued=issued, ended=ended)
    if oldest is not None:
        blocking = recorder.blocking
        progress["op"], progress["payload_bytes"] = oldest.key[1], oldest.payload_bytes
        progress["call"] = format_call(oldest)
        progress["since"] = recorder.to_unix_s(oldest.started_s)
        progress["sequence"] = oldest.sequence_number
        if oldest.peer >= 0:
            progress["peer"] = oldest.peer
        progress["blocking"] = blocking is not None and blocking.group is group
    return progress


def format_call(call: Collective) -> str:
    """Format an operation: "all_reduce of 1,024 float32", "broadcast of 8 int64 from rank 0", "barrier".

    The text is equal on all ranks that call this operation together.
    """
    op = call.key[1]
    if call.dtype is None:
        return op
    dtype = str(call.dtype).removeprefix("torch.")
    if op == "all_to_all":  # ranks may exchange different sizes
        return f"{op} of {dtype}"
    root = f" {'to' if op in ('reduce', 'gather') else 'from'} rank {call.root}" if call.root >= 0 else ""
    return f"{op} of {call.payload_bytes // call.dtype.itemsize:,} {dtype}{root}"


def _format_error(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return format_message(error)[:MAX_ERROR_CHARS]
    return "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR_CHARS]


def _format_stack(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_STACK_FRAMES:
        code = frame.f_code
        lines.append(_format_frame(code.co_filename, frame.f_lineno, code.co_qualname))
        frame = frame.f_back
    return lines[::-1]


def _format_frame(file: str, line: int, name: str) -> str:
    return f"{file[-MAX_FRAME_NAME_CHARS:]}:{line} in {name[:MAX_FRAME_NAME_CHARS]}"


def _read_source(frame: str) -> str:
    """Return the source of a line "file:line in function", or "" if it is unknown."""
    file, _, line = frame.rpartition(" in ")[0].rpartition(":")
    return linecache.getline(file, int(line)).strip()[:MAX_SOURCE_CHARS] if line.isdecimal() else ""


class TimelineBuilder:
    """Select steps to trace, and build their items."""

    def __init__(self, recorder: Recorder, num_local_ranks: int) -> None:
        recorder.enable_tracing()
        self._recorder = recorder
        self._sampler = StepSampler(min(MAX_RANK_BYTES_PER_S, MAX_HOST_BYTES_PER_S / num_local_ranks))
        self._closed: deque[tuple[StepTrace, float]] = deque()  # with the time at which it was taken
        self._last_began_s: float | None = None  # start of the last traced step
        self._last_step = 0

    def take_items(self, *, final: bool = False) -> list[TimelineItem]:
        """Return the items of steps that are complete. `final` also returns the incomplete ones."""
        now_s = time.perf_counter()
        for trace in self._recorder.take_traces():
            if self._sampler.should_trace(trace.step):
                self._closed.append((trace, now_s))
        items = []
        while self._closed:
            trace, taken_s = self._closed[0]
            is_recent = now_s - taken_s < MAX_WAIT_FOR_END_S
            if not final and is_recent and any(not call.ended_s for call in trace.calls):
                break
            self._closed.popleft()
            items.append(self._build_bounded_item(trace))
        return items

    def _build_bounded_item(self, trace: StepTrace) -> TimelineItem:
        item = build_timeline(self._recorder, trace)
        num_bytes = len(msgpack.packb(item))
        max_events = len(trace.calls) + len(trace.spans)
        while num_bytes > MAX_ITEM_BYTES:
            max_events //= 2
            item = build_timeline(self._recorder, trace, max_events)
            num_bytes = len(msgpack.packb(item))
        steps = trace.step - self._last_step
        if self._last_began_s is not None and steps > 0:
            self._sampler.record_traced_step(num_bytes, (trace.began_s - self._last_began_s) / steps)
        self._last_began_s, self._last_step = trace.began_s, trace.step
        return item


def build_timeline(recorder: Recorder, trace: StepTrace, max_events: int = 2**30) -> TimelineItem:
    """Build the item of one step with at most `max_events` calls and spans each.

    Collectives without an end get the end of the step.
    """
    began_s = trace.began_s
    group_indices: dict[GroupState, int] = {}
    calls = CollectiveCalls(
        group=[], op=[], sequence=[], issued_us=[], blocked_us=[], ended_us=[], payload_bytes=[], peer=[]
    )
    for call in trace.calls[:max_events]:
        group_index = group_indices.setdefault(call.group, len(group_indices))
        if group_index >= MAX_TIMELINE_GROUPS:
            continue
        ended_s = call.ended_s or max(trace.ended_s, call.started_s)
        calls["group"].append(group_index)
        calls["op"].append(call.key[1])
        calls["sequence"].append(call.sequence_number)
        calls["issued_us"].append(round((call.started_s - began_s) * 1e6))
        # The waiting thread wakes up slightly after the callback records the end.
        calls["blocked_us"].append(round(min(call.blocked_s, ended_s - call.started_s) * 1e6))
        calls["ended_us"].append(round((ended_s - began_s) * 1e6))
        calls["payload_bytes"].append(call.payload_bytes)
        calls["peer"].append(call.peer)
    shown = trace.spans[:max_events]
    spans = ComputeSpans(
        work=[span.work for span in shown],
        chunk=[span.chunk for span in shown],
        micro_batch=[span.micro_batch for span in shown],
        from_us=[round((span.from_s - began_s) * 1e6) for span in shown],
        to_us=[round((span.to_s - began_s) * 1e6) for span in shown],
    )
    num_events = len(trace.calls) + len(trace.spans)
    return TimelineItem(
        kind="timeline",
        rank=recorder.rank,
        time=time.time(),
        step=trace.step,
        began=recorder.to_unix_s(began_s),
        step_s=trace.ended_s - began_s,
        groups=[recorder.get_group_ranks(group) for group in list(group_indices)[:MAX_TIMELINE_GROUPS]],
        calls=calls,
        spans=spans,
        left_out=trace.left_out + num_events - len(calls["op"]) - len(shown),
    )
