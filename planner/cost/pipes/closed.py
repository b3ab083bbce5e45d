"""What a schedule idles and keeps, without simulating the whole step: a search asks this thousands of times."""

from __future__ import annotations

from functools import cache

from planner.cost.pipes.simulate import most_in_flight, simulate
from planner.facts.layout import V_SCHEDULES
from planner.facts.schedules import build_actions
from planner.facts.spec import Layout

GRAIN = 20


def bubble_ratio(layout: Layout, micro_batches: int, forward_s: float, inputs_s: float, weights_s: float) -> float:
    """Idle time of a rank over (pp - 1) times its work on one micro-batch; the seconds are of a whole stage.

    1F1B and GPipe 1, interleaved 1/v (2104.04473 section 2.2), naive the number of micro-batches. Looped BFS as
    interleaved, and with fewer micro-batches than stages each chunk but the last waits for the others to come round.
    Zero bubble fills the drain with the shortest of its three parts (2401.10241 section 3, whose F + B - W takes W to
    be that).
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
        return _dualpipev_idle(hops, *chunk) / (hops * work)
    if micro_batches >= 2 * layout.pp - 1:
        return _zbv_idle(hops, *chunk) / (hops * work)
    return _simulated(layout.pp, micro_batches, round(GRAIN * forward_s / work), round(GRAIN * inputs_s / work))


def _zbv_idle(hops: int, f: float, i: float, w: float) -> float:
    """The longest of the paths that can bound the order of ZBV, for one chunk's seconds.

    No paper gives these for unequal durations: they were read from the simulation's slopes, which the tests compare.
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


def _dualpipev_idle(hops: int, f: float, i: float, w: float) -> float:
    """The longest of the paths that can bound DualPipeV's order, read from the simulation as ZBV's.

    DualPipe's authors give (p - 1)(F&B + B - 3W) for pairs that pass on both results at their end; here each is passed
    on when it is ready, which leaves less idle.
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
def _simulated(pp: int, m: int, forward: int, inputs: int) -> float:
    """ZBV with fewer micro-batches than its pattern needs; durations in GRAINs of the whole."""
    weights = max(0, GRAIN - forward - inputs)
    layout = Layout(pp=pp, schedule="zbv", virtual_stages=2)
    timeline = simulate(layout, m, forward_s=forward / 2, inputs_s=inputs / 2, weights_s=weights / 2)
    return (timeline.step_s - max(timeline.busy_s)) / ((pp - 1) * (forward + inputs + weights))


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Most (chunk, micro-batch) pairs a rank keeps between their forward and the end of their backward.

    2104.04473 section 2.2 and 2205.05198 section 4.2.3 for 1F1B and its interleaved form.
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
        return _counted(p, stage, m)
    return 2 * p + (layout.schedule == "dualpipev")


@cache
def _counted(pp: int, stage: int, m: int) -> int:
    return most_in_flight(build_actions(Layout(pp=pp, schedule="zbv", virtual_stages=2), stage, m))
