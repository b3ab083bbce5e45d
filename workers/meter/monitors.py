"""Monitors that the thread of the exporter polls: stalls of the training thread, and resource usage."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import FrameType

import torch

from contracts.telemetry.health import GaugeItem, GroupProgress, StallItem
from workers.meter.collectives import GroupState
from workers.meter.recorder import Recorder
from workers.meter.work import MAIN_THREAD

GAUGE_PERIOD_S = 5.0
STALL_S = 2.0  # without progress, and between two reports
MAX_STALL_GROUPS = 256
MAX_STACK_FRAMES = 60  # the innermost
MAX_FRAME_NAME_CHARS = 300  # the end of a file name
STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
    groups = [group for group in recorder.groups.all() if group.issued or group.p2p_counts]
    groups.sort(key=lambda group: not group.in_flight)  # groups with operations in flight come first
    frame = sys._current_frames().get(MAIN_THREAD or 0)
    return StallItem(
        kind="standing",
        rank=recorder.rank,
        time=time.time(),
        step=recorder.completed_steps,
        phase=recorder.phase,
        still=stalled_s,
        groups=[_get_group_progress(recorder, group) for group in groups[:MAX_STALL_GROUPS]],
        stack=_format_stack(frame),
    )


def _get_group_progress(recorder: Recorder, group: GroupState) -> GroupProgress:
    issued, ended, oldest = recorder.get_progress(group)
    progress = GroupProgress(group=recorder.get_group_ranks(group), issued=issued, ended=ended)
    if oldest is not None:
        blocking = recorder.blocking
        progress["op"], progress["payload_bytes"] = oldest.key[1], oldest.payload_bytes
        progress["since"] = recorder.to_unix_s(oldest.started_s)
        progress["sequence"] = oldest.sequence_number
        if oldest.peer >= 0:
            progress["peer"] = oldest.peer
        progress["blocking"] = blocking is not None and blocking.group is group
    return progress


def _format_stack(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_STACK_FRAMES:
        code = frame.f_code
        file, name = code.co_filename[-MAX_FRAME_NAME_CHARS:], code.co_qualname[:MAX_FRAME_NAME_CHARS]
        lines.append(f"{file}:{frame.f_lineno} in {name}")
        frame = frame.f_back
    return lines[::-1]
