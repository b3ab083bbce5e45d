"""Steps event by event, as items: which of them, and how long at most."""

from __future__ import annotations

import time
from collections import deque

import msgpack

from contracts.telemetry.timeline import CollectiveCalls, ComputeSpans, GroupRanks, TimelineItem
from workers.meter.collectives import GroupState, StepTrace
from workers.meter.recorder import Recorder
from workers.step_sampling import StepSampler

MAX_HOST_BYTES_PER_S = 2 * 2**20  # of all ranks of a host, half of what its supervisor reads
MAX_RANK_BYTES_PER_S = 128 * 2**10  # of one rank
MAX_ITEM_BYTES = 192 * 2**10
MAX_TIMELINE_GROUPS = 256
MAX_WAIT_FOR_END_S = 1.0  # what has not ended so long after its step is told without its end


class TimelineBuilder:
    """Of the steps that a recorder has kept, those to tell."""

    def __init__(self, recorder: Recorder, ranks_here: int) -> None:
        recorder.enable_tracing()
        self._recorder = recorder
        self._thinning = StepSampler(min(MAX_RANK_BYTES_PER_S, MAX_HOST_BYTES_PER_S / ranks_here))
        self._closed: deque[tuple[StepTrace, float]] = deque()  # and when we took it
        self._last_s: float | None = None  # when the last step that was told began, and which that was
        self._last_step = 0

    def take_items(self, *, final: bool = False) -> list[TimelineItem]:
        """What is to be told now. `final`: whatever has not ended."""
        now_s = time.perf_counter()
        for log in self._recorder.take_traces():
            if self._thinning.should_trace(log.step):
                self._closed.append((log, now_s))
        told = []
        while self._closed:
            log, taken_s = self._closed[0]
            if not final and now_s - taken_s < MAX_WAIT_FOR_END_S and any(not call.ended_s for call in log.calls):
                break
            self._closed.popleft()
            told.append(self._told(log))
        return told

    def _told(self, log: StepTrace) -> TimelineItem:
        item = build_timeline(self._recorder, log)
        num_bytes = len(msgpack.packb(item))
        most = len(log.calls) + len(log.spans)
        while num_bytes > MAX_ITEM_BYTES:
            most //= 2
            item = build_timeline(self._recorder, log, most)
            num_bytes = len(msgpack.packb(item))
        steps = log.step - self._last_step
        if self._last_s is not None and steps > 0:
            self._thinning.record_traced_step(num_bytes, (log.began_s - self._last_s) / steps)
        self._last_s, self._last_step = log.began_s, log.step
        return item


def build_timeline(recorder: Recorder, log: StepTrace, most: int = 2**30) -> TimelineItem:
    """One step, of which `most` calls and spans are told. What has not ended ends with the step, as far as is known."""
    began_s = log.began_s
    places: dict[GroupState, int] = {}
    calls = CollectiveCalls(
        group=[], op=[], sequence=[], issued_us=[], blocked_us=[], ended_us=[], payload_bytes=[], peer=[]
    )
    for call in log.calls[:most]:
        place = places.setdefault(call.group, len(places))
        if place >= MAX_TIMELINE_GROUPS:
            continue
        ended_s = call.ended_s or max(log.ended_s, call.started_s)
        calls["group"].append(place)
        calls["op"].append(call.key[1])
        calls["sequence"].append(call.sequence_number)
        calls["issued_us"].append(round((call.started_s - began_s) * 1e6))
        # Who waits hears of the end a little later than the thread that calls back.
        calls["blocked_us"].append(round(min(call.blocked_s, ended_s - call.started_s) * 1e6))
        calls["ended_us"].append(round((ended_s - began_s) * 1e6))
        calls["payload_bytes"].append(call.payload_bytes)
        calls["peer"].append(call.peer)
    shown = log.spans[:most]
    spans = ComputeSpans(
        work=[span.work for span in shown],
        chunk=[span.chunk for span in shown],
        micro_batch=[span.micro_batch for span in shown],
        from_us=[round((span.from_s - began_s) * 1e6) for span in shown],
        to_us=[round((span.to_s - began_s) * 1e6) for span in shown],
    )
    groups: list[GroupRanks] = [recorder.get_group_ranks(group) for group in list(places)[:MAX_TIMELINE_GROUPS]]
    events = len(log.calls) + len(log.spans)
    return TimelineItem(
        kind="timeline",
        rank=recorder.rank,
        time=time.time(),
        step=log.step,
        began=recorder.to_unix_s(began_s),
        step_s=log.ended_s - began_s,
        groups=groups,
        calls=calls,
        spans=spans,
        left_out=log.left_out + events - len(calls["op"]) - len(shown),
    )
