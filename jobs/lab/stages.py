"""A collective stage by stage: which elements go from whom to whom, computed from the tensors that a run captured.

The algorithms are those whose cost the page names: rings for what every rank takes part in, a binomial tree where one
rank gives to or takes from all (Thakur, Rabenseifner and Gropp 2005). A backend may go another way; what every rank
holds in the end is the same, and is compared with what was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from planner.facts.lab import LabResult, LabStep

Row = list[float | None]  # of one rank; None: nothing is there yet
Rows = list[Row]


class Move(NamedTuple):
    """An element that goes from one place of the group to another; `combined`: with what is there."""

    source: int
    target: int
    source_index: int
    target_index: int
    combined: bool


class Stage(NamedTuple):
    """What goes at the same time, and what every rank holds when it has arrived."""

    words: str
    moves: list[Move]
    rows: Rows
    given: bool  # they come from the buffers that ranks gave, which stay as they are


class Moving(NamedTuple):
    """A primitive from its first to its last stage; `start`: what ranks hold in the buffers that are drawn."""

    algorithm: str
    start: Rows
    stages: list[Stage]
    agrees: bool  # with what was captured


class _Group:
    """Buffers of all ranks while elements go to and fro."""

    def __init__(self, rows: Rows, combine: Callable[[float, float], float]) -> None:
        self.rows, self._combine = rows, combine
        self.stages: list[Stage] = []

    def send(self, words: str, moves: list[Move], given: Rows | None = None) -> None:
        """All at once: what arrives is what stood there before any of it moved, or what ranks gave."""
        before = _copy(self.rows if given is None else given)
        for move in moves:
            value, row = before[move.source][move.source_index], self.rows[move.target]
            held = row[move.target_index]
            adds = move.combined and value is not None and held is not None
            row[move.target_index] = self._combine(held, value) if adds else value  # type: ignore[arg-type]
        if moves:
            self.stages.append(Stage(words, moves, _copy(self.rows), given is not None))


def moving(result: LabResult, step: LabStep) -> Moving | None:
    """None of what has no stages to show, or of buffers that are none a collective could have had."""
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
        return None  # a host may have told anything
    if not stages:
        return None
    return Moving(algorithm, start, stages, _same(step.primitive, stages[-1].rows, after, root))


def _sum(a: float, b: float) -> float:
    return a + b


def _same(primitive: str, found: Rows, after: Rows, root: int) -> bool:
    """Of a reduction to one rank, what the others hold afterwards is promised by nobody."""
    if primitive == "reduce":
        return found[root] == after[root]
    return all(row == captured for row, captured in zip(found, after, strict=True) if captured)


Combine = Callable[[float, float], float]
Made = tuple[str, Rows, list[Stage]]


def _parts(length: int, count: int) -> list[range]:
    """`length` elements in `count` parts that differ by one at most."""
    edges = [i * length // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _copy(rows: Rows) -> Rows:
    return [list(row) for row in rows]


def _tree(count: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs (who has it, who gets it) of each round of a binomial tree, counted from the root."""
    reach = 1
    while reach < count:
        yield [(place, place + reach) for place in range(reach) if place + reach < count]
        reach *= 2


def _broadcast(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    group, n = _Group(_copy(before), combine), len(before)
    length = len(before[root])
    for pairs in _tree(n):
        moves = [Move((a + root) % n, (b + root) % n, i, i, False) for a, b in pairs for i in range(length)]
        group.send("every rank that has the root's tensor sends it to one that has not", moves)
    return "a binomial tree", _copy(before), group.stages


def _reduce(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    group, n = _Group(_copy(before), combine), len(before)
    for pairs in reversed(list(_tree(n))):
        moves = [Move((b + root) % n, (a + root) % n, i, i, True) for a, b in pairs for i in range(len(before[root]))]
        group.send("half of the ranks send what they have combined so far to the other half", moves)
    return "a binomial tree, from its leaves", _copy(before), group.stages


def _scatter(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    share, n = len(after[root]), len(before)
    start: Rows = [[None] * share for _ in range(n)]
    group = _Group(_copy(start), combine)
    for place in range(n):
        moves = [Move(root, place, place * share + i, i, False) for i in range(share)]
        words = "the root keeps its own part" if place == root else f"the root sends part {place + 1} of {n}"
        group.send(words, moves, before)
    return "the root sends each part straight to its rank", start, group.stages


def _gather(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    share, n = len(before[root]), len(before)
    start: Rows = [[None] * (share * n) if place == root else [] for place in range(n)]
    group = _Group(_copy(start), combine)
    for place in range(n):
        moves = [Move(place, root, i, place * share + i, False) for i in range(share)]
        words = (
            "the root puts its own part in its place" if place == root else f"part {place + 1} of {n} reaches the root"
        )
        group.send(words, moves, before)
    return "each rank sends its part straight to the root", start, group.stages


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
    shown.send("each rank keeps the part that is now whole", moves, group.rows)
    kept = [stage._replace(given=False) for stage in shown.stages]
    return "a ring", _copy(before), [*group.stages, *kept]


def _all_reduce(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n, group = len(before), _Group(_copy(before), combine)
    parts = _parts(len(before[0]), n)
    _combine_on(group, parts, owner=lambda place: (place + 1) % n)
    _pass_on(group, parts, own=lambda place: (place + 1) % n)
    return "a ring: a reduce-scatter, then an all-gather", _copy(before), group.stages


def _combine_on(group: _Group, parts: list[range], owner: Callable[[int], int]) -> None:
    """Partial sums go once round; in the end the rank at `place` has part owner(place) whole."""
    n = len(parts)
    of = {owner(place): place for place in range(n)}
    for turn in range(n - 1):
        moves = []
        for part, indices in enumerate(parts):
            source = (of[part] + 1 + turn) % n  # it begins beside the rank where it ends
            moves += [Move(source, (source + 1) % n, i, i, True) for i in indices]
        words = f"round {turn + 1} of {n - 1}: every rank adds its own to the part that reaches it"
        group.send(words, moves)


def _pass_on(group: _Group, parts: list[range], own: Callable[[int], int]) -> None:
    """Whole parts go once round."""
    n = len(parts)
    for turn in range(n - 1):
        moves = []
        for place in range(n):
            moves += [Move(place, (place + 1) % n, i, i, False) for i in parts[(own(place) - turn) % n]]
        words = f"round {turn + 1} of {n - 1}: every rank sends on the whole part that it got last"
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
        ahead = f"every rank sends to the one {turn} ahead, and hears from the one {turn} behind"
        group.send(ahead if turn else "every rank keeps its own part", moves, before)
    return "n − 1 exchanges of pairs", start, group.stages  # noqa: RUF001


def _messages(before: Rows, after: Rows, root: int, combine: Combine) -> Made:
    n = len(before)
    start: Rows = [[None] * len(row) for row in after]
    group = _Group(_copy(start), combine)
    moves = [Move(p, (p + 1) % n, i, i, False) for p in range(n) for i in range(len(before[p]))]
    group.send("every rank sends to the next and receives from the one before", moves, before)
    return "messages round a ring", start, group.stages


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
