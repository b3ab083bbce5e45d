"""Where a rank stands that stands still, told by the exporter's thread: the training thread may be waiting for ever in
native code."""

from __future__ import annotations

import sys
import time
from types import FrameType

from contracts.telemetry.health import GroupProgress, StallItem
from workers.meter.completion import MAIN_THREAD
from workers.meter.groups import Group
from workers.meter.recorder import Recorder

STILL_S = 2.0  # without anything issued, ended or begun, and between two tellings
MOST_GROUPS = 256
MOST_FRAMES = 60  # the innermost
MOST_FILE = 300  # characters of a file's name, its end


class Watch:
    """Sees that nothing moves any more."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told_s = 0.0
        self._stood = False

    def look(self) -> StallItem | None:
        """What is to be told now, if anything: again and again while it stands, and once when it moves again."""
        now_s = time.perf_counter()
        still_s = now_s - self._recorder.moved_s
        if still_s < STILL_S:
            moved, self._stood = self._stood, False
            return standing(self._recorder, 0.0) if moved else None
        if self._stood and now_s - self._told_s < STILL_S:
            return None
        self._stood, self._told_s = True, now_s
        return standing(self._recorder, still_s)


def standing(recorder: Recorder, still_s: float) -> StallItem:
    groups = [group for group in recorder.groups.all() if group.issued or group.passed]
    groups.sort(key=lambda group: not group.flying)  # those that something is on its way on are told in any case
    frame = sys._current_frames().get(MAIN_THREAD or 0)
    return StallItem(
        kind="standing",
        rank=recorder.rank,
        time=time.time(),
        step=recorder.completed,
        phase=recorder.phase,
        still=still_s,
        groups=[_of(recorder, group) for group in groups[:MOST_GROUPS]],
        stack=_stack(frame),
    )


def _of(recorder: Recorder, group: Group) -> GroupProgress:
    issued, ended, oldest = recorder.stands(group)
    told = GroupProgress(group=recorder.identity(group), issued=issued, ended=ended)
    if oldest is not None:
        waits_for = recorder.waits_for
        told["op"], told["payload_bytes"] = oldest.key[1], oldest.payload_bytes
        told["since"] = recorder.unix(oldest.started_s)
        told["sequence"] = oldest.number
        if oldest.peer >= 0:
            told["peer"] = oldest.peer
        told["blocking"] = waits_for is not None and waits_for.group is group
    return told


def _stack(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_FRAMES:
        code = frame.f_code
        lines.append(f"{code.co_filename[-MOST_FILE:]}:{frame.f_lineno} in {code.co_qualname[:MOST_FILE]}")
        frame = frame.f_back
    return lines[::-1]
