"""The stages of a collective: which elements move between which ranks, computed from the tensors before it.

The algorithms are the ones whose cost the page shows: rings, and binomial trees for broadcast and reduce (Thakur,
Rabenseifner and Gropp 2005). A backend may use another algorithm. The last stage is compared with the captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

from planner.facts.collectives import LabStep

Row = list[float | None]  # elements of one rank, None for an empty place
Rows = list[Row]


class Setting(Protocol):
    """The settings of a run that decide the result of a collective."""

    @property
    def root(self) -> int: ...

    @property
    def reduce_op(self) -> str: ...


class Move(NamedTuple):
    """The move of one element between two ranks of the group. `combined`: reduced into the element at the target."""

    source: int
    target: int
    source_index: int
    target_index: int
    combined: bool


class Stage(NamedTuple):
    """Moves that run at the same time, and the tensors of each rank after them."""

    words: str
    moves: list[Move]
    rows: Rows
    given: bool  # whether the elements come from separate input buffers, which do not change


class Moving(NamedTuple):
    """All stages of a collective. `start`: the drawn buffers before the first stage."""

    algorithm: str
    start: Rows
    stages: list[Stage]
    agrees: bool  # whether the last stage equals the captured tensors


class _Group:
    """Buffers of all ranks during the stages."""

    def __init__(self, rows: Rows, combine: Callable[[float, float], float]) -> None:
        self.rows, self._combine = rows, combine
        self.stages: list[Stage] = []

    def send(self, words: str, moves: list[Move], given: Rows | None = None) -> None:
        """Apply moves at once. They read the buffers before the stage, or `given`."""
        before = _copy(self.rows if given is None else given)
        for move in moves:
            value, row = before[move.source][move.source_index], self.rows[move.target]
            held = row[move.target_index]
            adds = move.combined and value is not None and held is not None
            row[move.target_index] = self._combine(held, value) if adds else value  # type: ignore[arg-type]
        if moves:
            self.stages.append(Stage(words, moves, _copy(self.rows), given is not None))


def moving(result: Setting, step: LabStep) -> Moving | None:
    """Return the stages of a collective, or None for a barrier and for impossible buffers."""
    before: Rows = [list(holding.before or ()) for holding in step.holdings]
    after: Rows = [list(holding.after or ()) for holding in step.holdings]
    make = _ALGORITHMS.get(step.primitive)
    ranks = [holding.rank for holding in step.holdings]
    root = ranks.index(result.root) if result.root in ranks else 0
    if make is None:
        return None
    try:
        algorithm, start, stages = make(before, after, root, max if result.reduce_op == "max" else _sum)
    except (IndexError, TypeError, ValueError):
        return None  # a host may have sent impossible buffers
    if not stages:
        return None
    return Moving(algorithm, start, stages, _same(step.primitive, stages[-1].rows, after, root))


def _sum(a: float, b: float) -> float:
    return a + b


def _same(primitive: str, found: Rows, after: Rows, root: int) -> bool:
    """Compare the last stage with the captured tensors. After a reduce, only the root has a defined result."""
    if primitive == "reduce":
        return found[root] == after[root]
    return all(row == captured for row, captured in zip(found, after, strict=True) if captured)


Combine = Callable[[float, float], float]
Made = tuple[str, Rows, list[Stage]]


def _parts(length: int, count: int) -> list[range]:
    """Split `length` elements into `count` parts whose sizes differ by at most one."""
    edges = [i * length // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _copy(rows: Rows) -> Rows:
    return [list(row) for row in rows]


def _tree(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs (sender, receiver) of each round of a binomial tree, counted from the root."""
    reach = 1
    while reach < count:
        yield [(place, place + reach) for place in range(reach) if place + reach < count]
        reach *= 2


def _broadcast(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    group, n = _Group(_copy(before), combine), len(before)
    length = len(before[root])
    for pairs in _tree(n):
        moves = [Move((a + root) % n, (b + root) % n, i, i, False) for a, b in pairs for i in range(length)]
        group.send(
            "Every rank that has the tensor of the root sends the tensor to a rank that does not have it.", moves
        )
    return "a binomial tree", _copy(before), group.stages


def _reduce(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    group, n = _Group(_copy(before), combine), len(before)
    for pairs in reversed(list(_tree(n))):
        moves = [Move((b + root) % n, (a + root) % n, i, i, True) for a, b in pairs for i in range(len(before[root]))]
        group.send("Half of the ranks send their partial results to the other half.", moves)
    return "a binomial tree", _copy(before), group.stages


def _scatter(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    share, n = len(after[root]), len(before)
    start: Rows = [[None] * share for _ in range(n)]
    group = _Group(_copy(start), combine)
    for place in range(n):
        moves = [Move(root, place, place * share + i, i, False) for i in range(share)]
        words = "The root keeps its own shard." if place == root else f"The root sends shard {place + 1} of {n}."
        group.send(words, moves, before)
    return "direct sends from the root", start, group.stages


def _gather(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    share, n = len(before[root]), len(before)
    start: Rows = [[None] * (share * n) if place == root else [] for place in range(n)]
    group = _Group(_copy(start), combine)
    for place in range(n):
        moves = [Move(place, root, i, place * share + i, False) for i in range(share)]
        words = "The root copies its own shard." if place == root else f"The root receives shard {place + 1} of {n}."
        group.send(words, moves, before)
    return "direct sends to the root", start, group.stages


def _all_gather(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    share, n = len(before[0]), len(before)
    start: Rows = [[None] * (share * n) for _ in range(n)]
    for place in range(n):
        start[place][place * share : (place + 1) * share] = before[place]
    group = _Group(_copy(start), combine)
    _pass_on(group, [range(p * share, (p + 1) * share) for p in range(n)], own=lambda place: place)
    return "a ring", start, group.stages


def _reduce_scatter(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n, group = len(before), _Group(_copy(before), combine)
    parts = _parts(len(before[0]), n)
    _combine_on(group, parts, owner=lambda place: place)
    shares: Rows = [[None] * len(parts[place]) for place in range(n)]
    shown = _Group(shares, combine)
    moves = [Move(p, p, index, i, False) for p in range(n) for i, index in enumerate(parts[p])]
    shown.send("Each rank keeps its reduced shard.", moves, group.rows)
    kept = [stage._replace(given=False) for stage in shown.stages]
    return "a ring", _copy(before), [*group.stages, *kept]


def _all_reduce(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n, group = len(before), _Group(_copy(before), combine)
    parts = _parts(len(before[0]), n)
    _combine_on(group, parts, owner=lambda place: (place + 1) % n)
    _pass_on(group, parts, own=lambda place: (place + 1) % n)
    return "a ring reduce-scatter and a ring all-gather", _copy(before), group.stages


def _combine_on(group: _Group, parts: list[range], owner: Callable[[int], int]) -> None:
    """Pass partial results once around the ring. In the end, rank `place` has the reduced part owner(place)."""
    n = len(parts)
    of = {owner(place): place for place in range(n)}
    for turn in range(n - 1):
        moves = []
        for part, indices in enumerate(parts):
            source = (of[part] + 1 + turn) % n  # the neighbor of the rank where the part ends
            moves += [Move(source, (source + 1) % n, i, i, True) for i in indices]
        words = f"Every rank combines the received shard with its own shard (reduce round {turn + 1} of {n - 1})."
        group.send(words, moves)


def _pass_on(group: _Group, parts: list[range], own: Callable[[int], int]) -> None:
    """Pass complete parts once around the ring."""
    n = len(parts)
    for turn in range(n - 1):
        moves = []
        for place in range(n):
            moves += [Move(place, (place + 1) % n, i, i, False) for i in parts[(own(place) - turn) % n]]
        words = f"Every rank forwards its latest complete shard (gather round {turn + 1} of {n - 1})."
        group.send(words, moves)


def _all_to_all(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n = len(before)
    share = len(before[0]) // n
    start: Rows = [[None] * (share * n) for _ in range(n)]
    group = _Group(_copy(start), combine)
    for turn in range(n):
        moves = [
            Move(place, (place + turn) % n, ((place + turn) % n) * share + i, place * share + i, False)
            for place in range(n)
            for i in range(share)
        ]
        words = (
            f"Every rank sends one shard to the rank {turn} positions ahead."
            if turn
            else "Every rank keeps its own shard."
        )
        group.send(words, moves, before)
    return "n − 1 pairwise exchanges", start, group.stages  # noqa: RUF001


def _messages(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n = len(before)
    start: Rows = [[None] * len(row) for row in after]
    group = _Group(_copy(start), combine)
    moves = [Move(p, (p + 1) % n, i, i, False) for p in range(n) for i in range(len(before[p]))]
    group.send("Every rank sends to the next rank and receives from the previous rank.", moves, before)
    return "messages around a ring", start, group.stages


_ALGORITHMS: dict[str, Callable[[Rows, Rows, int, Combine], Made]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "send_recv": _messages,
    "isend_irecv": _messages,
}
