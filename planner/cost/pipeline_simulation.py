"""Simulate pipeline schedules: when each action runs, how long ranks idle, and how many chunks are in flight.

A search needs the last two thousands of times, so closed forms replace the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from planner.facts.layout import V_SCHEDULES, get_num_chunks
from planner.facts.schedules import Action, ActionKind, build_actions
from planner.facts.spec import Layout

GRAIN = 20  # steps of a simulated duration, so that similar durations share a simulation


class TimedAction(NamedTuple):
    """One action on one rank, with its start and end in seconds."""

    rank: int
    kind: ActionKind
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class PipelineTimeline(NamedTuple):
    """All actions of a step.

    `busy_s`: seconds in which each rank computes. `bubble`: idle fraction of all ranks' time. `in_flight`: by rank, the
    most (chunk, micro-batch) pairs between their forward and the end of their backward.
    """

    cells: list[TimedAction]
    step_s: float
    busy_s: tuple[float, ...]
    bubble: float
    in_flight: tuple[int, ...]


def simulate(
    layout: Layout,
    micro_batches: int,
    *,
    forward_s: float,
    inputs_s: float,
    weights_s: float,
    slowdowns: Sequence[float] = (),
) -> PipelineTimeline:
    """Run the actions of every rank as early as their inputs allow. Seconds are those of one chunk and micro-batch.

    Args:
        slowdowns: factor on the durations of each rank, if ranks differ.
    """
    pp = layout.pp
    slowdowns = slowdowns or (1.0,) * pp
    lists = [build_actions(layout, rank, micro_batches) for rank in range(pp)]
    seconds = {"F": forward_s, "B": inputs_s + weights_s, "I": inputs_s, "W": weights_s}
    last = get_num_chunks(layout) - 1
    ended: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * pp, [0] * pp
    cells: list[TimedAction] = []
    waiting = set(range(pp))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            while position[rank] < len(lists[rank]):
                action = lists[rank][position[rank]]
                ready = _get_ready_time(action, last, ended)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + seconds[action.kind] * slowdowns[rank]
                ended["B" if action.kind == "I" else action.kind, action.chunk, action.micro_batch] = clock[rank]
                cells.append(TimedAction(rank, action.kind, action.micro_batch, action.chunk, start, clock[rank]))
                position[rank] += 1
                moved = True
            if position[rank] == len(lists[rank]):
                waiting.discard(rank)
        assert moved or not waiting, f"{layout.schedule} deadlocks with pp {pp} and {micro_batches} micro-batches"
    step = max(clock)
    busy = tuple(sum(seconds[a.kind] for a in order) * times for order, times in zip(lists, slowdowns, strict=True))
    in_flight = tuple(count_max_in_flight(order) for order in lists)
    return PipelineTimeline(cells, step, busy, 1 - sum(busy) / (pp * step), in_flight)


def _get_ready_time(action: Action, last: int, ended: dict[tuple[str, int, int], float]) -> float | None:
    """Return when the inputs of an action are available, or None if one is not."""
    kind, i, chunk = action
    if kind == "W":
        return ended.get(("B", chunk, i))
    if kind == "F" and chunk == 0:
        return 0.0
    # A forward needs the chunk before, a backward the chunk after, and the last backward its own forward.
    source, needed = (chunk - 1, "F") if kind == "F" else (chunk, "F") if chunk == last else (chunk + 1, "B")
    return ended.get((needed, source, i))


def count_max_in_flight(order: list[Action]) -> int:
    """Return the most (chunk, micro-batch) pairs whose activations a rank holds until their weight gradients."""
    peak = in_flight = 0
    for action in order:
        if action.kind == "F":
            in_flight += 1
            peak = max(peak, in_flight)
        elif action.kind in ("B", "W"):
            in_flight -= 1
    return peak


class StretchedTimeline(NamedTuple):
    """Seconds of the step, and those in which each rank computes."""

    step_s: float
    busy_s: tuple[float, ...]


def stretch_timeline(timeline: PipelineTimeline, slowdown: Sequence[float]) -> StretchedTimeline:
    """Return the times of ranks that share the cores of one machine.

    With k active ranks, each takes slowdown[k - 1] times as long. All active ranks are slowed alike, so the order of
    the actions stays.
    """
    # A rank's next action may start when the previous one ends: ends (False) sort before starts (True).
    starts_and_ends = [((c.start_s, True, c.rank), (c.end_s, False, c.rank)) for c in timeline.cells]
    marks = sorted(chain.from_iterable(starts_and_ends))
    busy, active, step, before = [0.0] * len(timeline.busy_s), set[int](), 0.0, 0.0
    for at, starts, rank in marks:
        took = (at - before) * (slowdown[len(active) - 1] if active else 1.0)
        step += took
        for other in active:
            busy[other] += took
        before = at
        if starts:
            active.add(rank)
        else:
            active.remove(rank)
    return StretchedTimeline(step, tuple(busy))


def compute_bubble_ratio(
    layout: Layout, micro_batches: int, forward_s: float, inputs_s: float, weights_s: float
) -> float:
    """Return the idle time of a rank over (pp - 1) times its work on one micro-batch.

    1F1B and GPipe have 1, interleaved 1F1B 1/v (2104.04473 section 2.2), and naive the number of micro-batches. Looped
    BFS is like interleaved 1F1B. With fewer micro-batches than stages, each chunk but the last also waits for the other
    stages. Zero bubble fills the drain with the shortest of its three parts (2401.10241 section 3, whose F + B - W
    assumes that W is the shortest).

    Args:
        forward_s, inputs_s, weights_s: seconds of a whole stage on one micro-batch.
    """
    schedule, v = layout.schedule, layout.virtual_stages
    if schedule == "naive":
        return float(micro_batches)
    work, hops = forward_s + inputs_s + weights_s, layout.pp - 1
    if schedule == "interleaved_zero_bubble":
        return (work - weights_s - min(forward_s, inputs_s, weights_s)) / work / v
    if schedule == "looped_bfs":
        return (1 + (v - 1) * max(0, layout.pp - micro_batches) / hops) / v
    if schedule not in V_SCHEDULES:
        return 1 / v
    chunk = forward_s / v, inputs_s / v, weights_s / v
    if schedule == "dualpipev":
        return _compute_dualpipev_idle(hops, *chunk) / (hops * work)
    if micro_batches >= 2 * layout.pp - 1:
        return _compute_zbv_idle(hops, *chunk) / (hops * work)
    return _simulate_zbv(layout.pp, micro_batches, round(GRAIN * forward_s / work), round(GRAIN * inputs_s / work))


def _compute_zbv_idle(hops: int, f: float, i: float, w: float) -> float:
    """Return the longest path that can bound ZBV, from the seconds of one chunk's F, I, and W.

    No paper states these for unequal durations. They are the slopes of the simulation, and tests compare both.
    """
    return max(
        hops * i,
        hops * 2 * (i - w),
        i + (hops - 1) * w,
        f + (hops - 1) * w,
        hops * (2 * f - i) - w,
        hops * 2 * (f - w) - w,
        hops * (2 * f - i) - f + i,
        hops * 2 * (f - w) - f + i,
    )


def _compute_dualpipev_idle(hops: int, f: float, i: float, w: float) -> float:
    """Return the longest path that can bound DualPipeV, from slopes of the simulation as for ZBV.

    DualPipe's authors state (p - 1)(F&B + B - 3W) for pairs that send both results at their end. Here each result is
    sent when it is ready, which leaves less idle time.
    """
    return max(
        hops * f,
        hops * i - f,
        hops * (2 * i - w) - f,
        hops * (f + i - w),
        hops * 2 * (f - w),
        hops * (2 * f - i - w),
    )


@cache
def _simulate_zbv(pp: int, m: int, forward: int, inputs: int) -> float:
    """Return the ratio of ZBV with fewer micro-batches than its pattern needs. Durations are in GRAINs of the whole."""
    weights = max(0, GRAIN - forward - inputs)
    layout = Layout(pp=pp, schedule="zbv", virtual_stages=2)
    timeline = simulate(layout, m, forward_s=forward / 2, inputs_s=inputs / 2, weights_s=weights / 2)
    return (timeline.step_s - max(timeline.busy_s)) / ((pp - 1) * (forward + inputs + weights))


def count_chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return the most (chunk, micro-batch) pairs that a rank holds between forward and the end of backward.

    Sources: 2104.04473 section 2.2 and 2205.05198 section 4.2.3 for 1F1B and its interleaved form.
    """
    m, p, v = micro_batches, layout.pp, layout.virtual_stages
    if p == 1 or layout.schedule == "naive":
        return 1
    if layout.schedule in ("gpipe", "looped_bfs"):
        return m * v
    if layout.schedule == "1f1b":
        return min(m, p - stage)
    if layout.schedule == "interleaved_1f1b":
        return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)
    if layout.schedule == "interleaved_zero_bubble":
        return p * v
    if layout.schedule == "zbv" and m < 2 * p:
        return _count_zbv_in_flight(p, stage, m)
    return 2 * p + (layout.schedule == "dualpipev")


@cache
def _count_zbv_in_flight(pp: int, stage: int, m: int) -> int:
    return count_max_in_flight(build_actions(Layout(pp=pp, schedule="zbv", virtual_stages=2), stage, m))
