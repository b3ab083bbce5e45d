"""When each action of a schedule runs, and what idles meanwhile.

A pipe whose ranks share a machine's cores: what runs at once slows each other down.

What a schedule idles and keeps, without simulating the whole step: a search asks this thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from planner.facts.layout import V_SCHEDULES, get_num_chunks
from planner.facts.schedules import Action, ActionKind, build_actions
from planner.facts.spec import Layout


class Cell(NamedTuple):
    """One action on one rank, with its start and end in seconds."""

    rank: int
    kind: ActionKind
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class Timeline(NamedTuple):
    """`bubble`: share of all ranks' time in which they idle. `in_flight`: by rank, the most (chunk, micro-batch) pairs
    between their forward and the end of their backward."""

    cells: list[Cell]
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
    transfer_s: float = 0.0,
    longer: Sequence[float] = (),
) -> Timeline:
    """Run every rank's list as early as its inputs allow. Seconds are of one chunk and micro-batch.

    A forward needs the chunk before, a backward the chunk after; between ranks that takes `transfer_s`. `longer`: how
    many times as long each rank takes, where not all hold alike.
    """
    pp = layout.pp
    longer = longer or (1.0,) * pp
    lists = [build_actions(layout, rank, micro_batches) for rank in range(pp)]
    owner = {action.chunk: rank for rank, order in enumerate(lists) for action in order}
    seconds = {"F": forward_s, "B": inputs_s + weights_s, "I": inputs_s, "W": weights_s}
    last = get_num_chunks(layout) - 1
    ended: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * pp, [0] * pp
    cells: list[Cell] = []
    waiting = set(range(pp))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            while at[rank] < len(lists[rank]):
                action = lists[rank][at[rank]]
                ready = _ready(action, rank, last, ended, owner, transfer_s)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = start + seconds[action.kind] * longer[rank]
                ended[_done(action)] = clock[rank]
                cells.append(Cell(rank, action.kind, action.micro_batch, action.chunk, start, clock[rank]))
                at[rank] += 1
                moved = True
            if at[rank] == len(lists[rank]):
                waiting.discard(rank)
        assert moved or not waiting, f"{layout.schedule} deadlocks with pp {pp} and {micro_batches} micro-batches"
    step = max(clock)
    busy = tuple(sum(seconds[a.kind] for a in order) * times for order, times in zip(lists, longer, strict=True))
    in_flight = tuple(most_in_flight(order) for order in lists)
    return Timeline(cells, step, busy, 1 - sum(busy) / (pp * step), in_flight)


def most_in_flight(order: list[Action]) -> int:
    """Peak number of (chunk, micro-batch) pairs whose activations a rank keeps: until its weight gradients are done."""
    peak = held = 0
    for action in order:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind in ("B", "W"):
            held -= 1
    return peak


def _done(action: Action) -> tuple[str, int, int]:
    return ("B" if action.kind == "I" else action.kind), action.chunk, action.micro_batch


def _ready(
    action: Action,
    rank: int,
    last: int,
    ended: dict[tuple[str, int, int], float],
    owner: dict[int, int],
    transfer_s: float,
) -> float | None:
    """When what the action needs is there, None while something is not."""
    kind, i, chunk = action
    if kind == "W":
        return ended.get(("B", chunk, i))
    if kind == "F":
        if chunk == 0:
            return 0.0
        before = chunk - 1, ended.get(("F", chunk - 1, i))
    elif chunk == last:
        before = chunk, ended.get(("F", chunk, i))
    else:
        before = chunk + 1, ended.get(("B", chunk + 1, i))
    neighbour, end = before
    if end is None:
        return None
    return end + (transfer_s if owner[neighbour] != rank else 0.0)


class Stretched(NamedTuple):
    """Seconds of the step, and of them those in which each rank computes."""

    step_s: float
    busy_s: tuple[float, ...]


def stretched(timeline: Timeline, slowdown: Sequence[float]) -> Stretched:
    """The timeline of ranks that had the machine to themselves, when k that compute at once take slowdown[k - 1] times
    as long.

    All that compute at a moment are slowed alike, so no action overtakes another: time itself is stretched.
    """
    marks = sorted((at, change, cell.rank) for cell in timeline.cells for at, change in _ends(cell.start_s, cell.end_s))
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
    return Stretched(step, tuple(busy))


def _ends(start_s: float, end_s: float) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """A rank's next action may start when the one before ends: ends sort before starts."""
    return (start_s, True), (end_s, False)


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
