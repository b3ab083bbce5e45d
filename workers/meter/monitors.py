"""What this process holds and takes, every few seconds.

Where a rank stands that stands still, told by the exporter's thread: the training thread may be waiting for ever in
native code.
"""

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
STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ResourceMonitor:
    """Of one rank. Its first look is at once: the processors' use since it began."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._at_s, self._cpu_s = time.monotonic(), time.process_time()
        self._due_s = 0.0

    def poll(self) -> GaugeItem | None:
        """None until it is time again."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + GAUGE_PERIOD_S
        item = GaugeItem(kind="gauge", rank=self._rank, time=time.time())
        cpu_s = time.process_time()
        if now_s > self._at_s:
            item["cpu"] = (cpu_s - self._cpu_s) / (now_s - self._at_s)
        self._at_s, self._cpu_s = now_s, cpu_s
        item["resident_bytes"] = int(STATM.read_text().split()[1]) * PAGE_BYTES
        if torch.cuda.is_initialized():
            # On all devices: a new thread's current one is the first, whichever the training computes on.
            devices = range(torch.cuda.device_count())
            item["allocated_bytes"] = sum(map(torch.cuda.memory_allocated, devices))
            item["reserved_bytes"] = sum(map(torch.cuda.memory_reserved, devices))
        return item


STALL_S = 2.0  # without anything issued, ended or begun, and between two tellings
MAX_STALL_GROUPS = 256
MAX_STACK_FRAMES = 60  # the innermost
MAX_FRAME_NAME_CHARS = 300  # characters of a file's name, its end


class StallMonitor:
    """Sees that nothing moves any more."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told_s = 0.0
        self._stood = False

    def poll(self) -> StallItem | None:
        """What is to be told now, if anything: again and again while it stands, and once when it moves again."""
        now_s = time.perf_counter()
        still_s = now_s - self._recorder.last_progress_s
        if still_s < STALL_S:
            moved, self._stood = self._stood, False
            return get_stall(self._recorder, 0.0) if moved else None
        if self._stood and now_s - self._told_s < STALL_S:
            return None
        self._stood, self._told_s = True, now_s
        return get_stall(self._recorder, still_s)


def get_stall(recorder: Recorder, still_s: float) -> StallItem:
    groups = [group for group in recorder.groups.all() if group.issued or group.p2p_counts]
    groups.sort(key=lambda group: not group.in_flight)  # those that something is on its way on are told in any case
    frame = sys._current_frames().get(MAIN_THREAD or 0)
    return StallItem(
        kind="standing",
        rank=recorder.rank,
        time=time.time(),
        step=recorder.completed_steps,
        phase=recorder.phase,
        still=still_s,
        groups=[_of(recorder, group) for group in groups[:MAX_STALL_GROUPS]],
        stack=_stack(frame),
    )


def _of(recorder: Recorder, group: GroupState) -> GroupProgress:
    issued, ended, oldest = recorder.get_progress(group)
    told = GroupProgress(group=recorder.get_group_ranks(group), issued=issued, ended=ended)
    if oldest is not None:
        waits_for = recorder.blocking
        told["op"], told["payload_bytes"] = oldest.key[1], oldest.payload_bytes
        told["since"] = recorder.to_unix_s(oldest.started_s)
        told["sequence"] = oldest.sequence_number
        if oldest.peer >= 0:
            told["peer"] = oldest.peer
        told["blocking"] = waits_for is not None and waits_for.group is group
    return told


def _stack(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < MAX_STACK_FRAMES:
        code = frame.f_code
        lines.append(
            f"{code.co_filename[-MAX_FRAME_NAME_CHARS:]}:{frame.f_lineno} in {code.co_qualname[:MAX_FRAME_NAME_CHARS]}"
        )
        frame = frame.f_back
    return lines[::-1]
