"""Simulate the stages of a collective: which elements move between which ranks, from the tensors before it.

The algorithms are the ones whose cost the page shows: rings, and binomial trees for broadcast and reduce (Thakur,
Rabenseifner and Gropp 2005). A backend may use another algorithm. The last stage is compared with the captured tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from planner.facts.collectives import LabRankValues, LabResult, LabStep
from planner.facts.spec import LabPrimitive

RankValues = list[float | None]  # None for an empty place
GroupValues = list[RankValues]


class ExampleSettings(NamedTuple):
    """Hold the settings of the example that pages without a run show."""

    root: int = 0
    reduce_op: str = "sum"


EXAMPLE_SETTINGS = ExampleSettings()
CollectiveSettings = LabResult | ExampleSettings


class ElementMove(NamedTuple):
    """Move one element between two ranks of the group. `combined`: reduced into the element at the target."""

    source: int
    target: int
    source_index: int
    target_index: int
    combined: bool


class Stage(NamedTuple):
    """Hold moves that run at the same time, and the tensors of each rank after them."""

    words: str
    moves: list[ElementMove]
    rows: GroupValues
    from_input: bool  # whether the elements come from separate input buffers, which do not change


class SimulatedCollective(NamedTuple):
    """Hold all stages of a collective. `start`: the drawn buffers before the first stage."""

    algorithm: str
    start: GroupValues
    stages: list[Stage]
    agrees: bool  # whether the last stage equals the captured tensors


class _Simulation:
    """Hold the buffers of all ranks during the stages. The stages start from the input, or from empty buffers."""

    def __init__(self, step: LabStep, settings: CollectiveSettings) -> None:
        self.before: GroupValues = [list(holding.before or ()) for holding in step.holdings]
        self.after: GroupValues = [list(holding.after or ()) for holding in step.holdings]
        ranks = [holding.rank for holding in step.holdings]
        self.root = ranks.index(settings.root) if settings.root in ranks else 0
        self.size = len(ranks)
        self._combine: Callable[[float, float], float] = max if settings.reduce_op == "max" else operator.add
        self.stages: list[Stage] = []
        self.start_from(self.before)

    def start_from(self, rows: GroupValues) -> None:
        self.start, self.rows = _copy_rows(rows), _copy_rows(rows)

    def send(self, words: str, moves: list[ElementMove], source: GroupValues | None = None) -> None:
        """Apply moves at once. They read `source`, or the buffers before the stage."""
        values = _copy_rows(self.rows if source is None else source)
        for move in moves:
            value, row = values[move.source][move.source_index], self.rows[move.target]
            old = row[move.target_index]
            is_reduced = move.combined and value is not None and old is not None
            row[move.target_index] = self._combine(old, value) if is_reduced else value  # type: ignore[arg-type]
        if moves:
            self.stages.append(Stage(words, moves, _copy_rows(self.rows), source is self.before))


def simulate_collective(settings: CollectiveSettings, step: LabStep) -> SimulatedCollective | None:
    """Return the stages of a collective, or None for a barrier and for impossible buffers."""
    simulate = _ALGORITHMS.get(step.primitive)
    if simulate is None:
        return None
    simulation = _Simulation(step, settings)
    try:
        algorithm = simulate(simulation)
    except (IndexError, TypeError, ValueError):
        return None  # a host may have sent impossible buffers
    if not simulation.stages:
        return None
    agrees = _matches_result(step.primitive, simulation.stages[-1].rows, simulation.after, simulation.root)
    return SimulatedCollective(algorithm, simulation.start, simulation.stages, agrees)


def _matches_result(primitive: str, found: GroupValues, after: GroupValues, root: int) -> bool:
    """Compare the last stage with the captured tensors. After a reduce, only the root has a defined result."""
    if primitive == "reduce":
        return found[root] == after[root]
    return all(row == captured for row, captured in zip(found, after, strict=True) if captured)


def _split_evenly(length: int, count: int) -> list[range]:
    """Split `length` elements into `count` parts whose sizes differ by at most one."""
    edges = [i * length // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _copy_rows(rows: GroupValues) -> GroupValues:
    return [list(row) for row in rows]


def _iterate_tree_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs (sender, receiver) of each round of a binomial tree, counted from the root."""
    reach = 1
    while reach < count:
        yield [(place, place + reach) for place in range(reach) if place + reach < count]
        reach *= 2


def _broadcast(sim: _Simulation) -> str:
    n, root = sim.size, sim.root
    length = len(sim.before[root])
    for pairs in _iterate_tree_rounds(n):
        moves = [ElementMove((a + root) % n, (b + root) % n, i, i, False) for a, b in pairs for i in range(length)]
        sim.send("Every rank that has the tensor of the root sends the tensor to a rank that does not have it.", moves)
    return "a binomial tree"


def _reduce(sim: _Simulation) -> str:
    n, root = sim.size, sim.root
    length = len(sim.before[root])
    for pairs in reversed(list(_iterate_tree_rounds(n))):
        moves = [ElementMove((b + root) % n, (a + root) % n, i, i, True) for a, b in pairs for i in range(length)]
        sim.send("Half of the ranks send their partial results to the other half.", moves)
    return "a binomial tree"


def _scatter(sim: _Simulation) -> str:
    share, root = len(sim.after[sim.root]), sim.root
    sim.start_from([[None] * share for _ in range(sim.size)])
    for place in range(sim.size):
        moves = [ElementMove(root, place, place * share + i, i, False) for i in range(share)]
        words = "The root keeps its own shard." if place == root else f"The root sends shard {place + 1} of {sim.size}."
        sim.send(words, moves, sim.before)
    return "direct sends from the root"


def _gather(sim: _Simulation) -> str:
    share, root = len(sim.before[sim.root]), sim.root
    sim.start_from([[None] * (share * sim.size) if place == root else [] for place in range(sim.size)])
    for place in range(sim.size):
        moves = [ElementMove(place, root, i, place * share + i, False) for i in range(share)]
        words = (
            "The root copies its own shard." if place == root else f"The root receives shard {place + 1} of {sim.size}."
        )
        sim.send(words, moves, sim.before)
    return "direct sends to the root"


def _all_gather(sim: _Simulation) -> str:
    share, n = len(sim.before[0]), sim.size
    start: GroupValues = [[None] * (share * n) for _ in range(n)]
    for place in range(n):
        start[place][place * share : (place + 1) * share] = sim.before[place]
    sim.start_from(start)
    _ring_gather(sim, [range(p * share, (p + 1) * share) for p in range(n)], first_part=lambda place: place)
    return "a ring"


def _reduce_scatter(sim: _Simulation) -> str:
    parts = _split_evenly(len(sim.before[0]), sim.size)
    _ring_reduce(sim, parts, owned_part=lambda place: place)
    reduced, sim.rows = sim.rows, [[None] * len(part) for part in parts]
    moves = [ElementMove(p, p, index, i, False) for p, part in enumerate(parts) for i, index in enumerate(part)]
    sim.send("Each rank keeps its reduced shard.", moves, reduced)
    return "a ring"


def _all_reduce(sim: _Simulation) -> str:
    parts = _split_evenly(len(sim.before[0]), sim.size)
    _ring_reduce(sim, parts, owned_part=lambda place: (place + 1) % sim.size)
    _ring_gather(sim, parts, first_part=lambda place: (place + 1) % sim.size)
    return "a ring reduce-scatter and a ring all-gather"


def _ring_reduce(sim: _Simulation, parts: list[range], owned_part: Callable[[int], int]) -> None:
    """Pass partial results once around the ring. In the end, rank `place` has the reduced part owned_part(place)."""
    n = sim.size
    owner = {owned_part(place): place for place in range(n)}
    for turn in range(n - 1):
        moves = []
        for part, indices in enumerate(parts):
            source = (owner[part] + 1 + turn) % n  # the neighbor of the rank where the part ends
            moves += [ElementMove(source, (source + 1) % n, i, i, True) for i in indices]
        words = f"Every rank combines the received shard with its own shard (reduce round {turn + 1} of {n - 1})."
        sim.send(words, moves)


def _ring_gather(sim: _Simulation, parts: list[range], first_part: Callable[[int], int]) -> None:
    """Pass complete parts once around the ring."""
    n = sim.size
    for turn in range(n - 1):
        moves = []
        for place in range(n):
            moves += [ElementMove(place, (place + 1) % n, i, i, False) for i in parts[(first_part(place) - turn) % n]]
        words = f"Every rank forwards its latest complete shard (gather round {turn + 1} of {n - 1})."
        sim.send(words, moves)


def _all_to_all(sim: _Simulation) -> str:
    n = sim.size
    share = len(sim.before[0]) // n
    sim.start_from([[None] * (share * n) for _ in range(n)])
    for turn in range(n):
        moves = [
            ElementMove(place, (place + turn) % n, ((place + turn) % n) * share + i, place * share + i, False)
            for place in range(n)
            for i in range(share)
        ]
        words = f"Every rank sends one shard to the rank {turn} positions ahead."
        sim.send(words if turn else "Every rank keeps its own shard.", moves, sim.before)
    return "n − 1 pairwise exchanges"  # noqa: RUF001


def _send_to_neighbors(sim: _Simulation) -> str:
    n = sim.size
    sim.start_from([[None] * len(row) for row in sim.after])
    moves = [ElementMove(p, (p + 1) % n, i, i, False) for p in range(n) for i in range(len(sim.before[p]))]
    sim.send("Every rank sends to the next rank and receives from the previous rank.", moves, sim.before)
    return "messages around a ring"


# Each simulates one collective, and returns the name of its algorithm.
_ALGORITHMS: dict[str, Callable[[_Simulation], str]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_to_neighbors,
    "isend_irecv": _send_to_neighbors,
}

EXAMPLE_RANKS = 4
# Microseconds at which each rank arrives at the barrier of the example. Only the order matters, so pages hide them.
ARRIVALS = (0.0, 30.0, 10.0, 20.0)
BARRIER_END = 34.0


def make_example(primitive: LabPrimitive) -> LabStep:
    """Return the tensors of each rank before and after the collective, with one element per rank and shard."""
    ranks = range(EXAMPLE_RANKS)
    full = [tuple(100.0 * (rank + 1) + i for i in ranks) for rank in ranks]
    total = tuple(sum(row[i] for row in full) for i in ranks)
    first = tuple(row[0] for row in full)
    root = EXAMPLE_SETTINGS.root
    values: dict[LabPrimitive, list[tuple[tuple[float, ...] | None, tuple[float, ...] | None]]] = {
        "broadcast": [(full[r], full[root]) for r in ranks],
        "scatter": [(full[r] if r == root else None, (full[root][r],)) for r in ranks],
        "gather": [((full[r][0],), first if r == root else None) for r in ranks],
        "all_gather": [((full[r][0],), first) for r in ranks],
        "reduce": [(full[r], total if r == root else None) for r in ranks],
        "all_reduce": [(full[r], total) for r in ranks],
        "reduce_scatter": [(full[r], (total[r],)) for r in ranks],
        "all_to_all": [(full[r], tuple(row[r] for row in full)) for r in ranks],
        "send_recv": [(full[r], full[r - 1]) for r in ranks],
        "isend_irecv": [(full[r], full[r - 1]) for r in ranks],
        "barrier": [((arrival,), (BARRIER_END,)) for arrival in ARRIVALS],
    }
    holdings = tuple(
        LabRankValues(rank=rank, before=before, after=after) for rank, (before, after) in enumerate(values[primitive])
    )
    return LabStep(primitive=primitive, holdings=holdings)
