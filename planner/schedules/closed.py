"""What a schedule idles and keeps, without simulating the whole step: a search asks this thousands of times."""

from __future__ import annotations

from functools import cache

from planner.layout import V_SCHEDULES
from planner.schedules.actions import actions
from planner.schedules.simulate import most_in_flight, simulate
from planner.spec import Layout, Schedule

FEW_RANKS = 8
GRAIN = 20  # shares of forward and backward are told apart to a twentieth


def bubble_ratio(layout: Layout, micro_batches: int, forward_s: float, inputs_s: float, weights_s: float) -> float:
    """Idle time of a rank over (pp - 1) times its work on one micro-batch.

    1F1B and GPipe 1, interleaved 1/v (2104.04473 section 2.2), naive the number of micro-batches. Zero bubble fills the
    drain with weight gradients: F + I - W of F + I + W (2401.10241 section 3), and no less than F. For a V, whose
    shape has no such form, the schedule itself is simulated: on few ranks, since each hop adds as much.
    """
    schedule, v = layout.schedule, layout.virtual_stages
    if schedule == "naive":
        return float(micro_batches)
    if schedule == "interleaved_zero_bubble":
        work = forward_s + inputs_s + weights_s
        return (forward_s + max(0.0, inputs_s - weights_s)) / work / v
    if schedule not in V_SCHEDULES:
        return 1 / v
    pp = min(layout.pp, FEW_RANKS)
    m = min(-(-micro_batches * pp // layout.pp), 2 * pp)
    work = forward_s + inputs_s + weights_s
    return _simulated(schedule, pp, m, round(GRAIN * forward_s / work), round(GRAIN * inputs_s / work))


@cache
def _simulated(schedule: Schedule, pp: int, m: int, forward: int, inputs: int) -> float:
    weights = max(0, GRAIN - forward - inputs)
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=2)
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
    return most_in_flight(actions(Layout(pp=pp, schedule="zbv", virtual_stages=2), stage, m))
