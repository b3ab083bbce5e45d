"""When each action of a schedule runs, and what idles meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.facts.layout import get_num_chunks
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
