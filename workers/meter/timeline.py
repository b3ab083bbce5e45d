"""Build timeline items from step traces, within a byte rate."""

from __future__ import annotations

import time
from collections import deque

import msgpack

from contracts.telemetry.timeline import CollectiveCalls, ComputeSpans, TimelineItem
from workers.meter.collectives import GroupState, StepTrace
from workers.meter.recorder import Recorder
from workers.step_sampling import StepSampler

MAX_HOST_BYTES_PER_S = 2 * 2**20  # all ranks of a host, half of what its supervisor reads
MAX_RANK_BYTES_PER_S = 128 * 2**10
MAX_ITEM_BYTES = 192 * 2**10
MAX_TIMELINE_GROUPS = 256
MAX_WAIT_FOR_END_S = 1.0  # a collective that ends later after its step is sent without its end


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
