"""Waiting charged to the rank it is due to.

Who comes last to a collective may itself have waited before, for another: a rank late in a tensor-parallel group makes
its neighbour late for the data-parallel one. So each rank carries what it has waited in this step, by whom it was due
to; who waits for it is charged with that first, as far as the waiting rank has not waited for the same itself, and only
the rest is the last rank's own. (After the delays of D. Boehme et al., "Identifying the root causes of wait states in
large-scale parallel applications", ICPP 2010.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jobs.runs.diagnosis.events.meetings import Meeting

Charge = tuple[str, int]  # an axis, and the rank that waiting on it is due to


class Charged(NamedTuple):
    """Of one step. `waits`: by rank that waited, by charge, seconds. `came_last`, `calls`: by axis and rank, how often
    it did, and in how many collectives it can be told."""

    waits: dict[int, dict[Charge, float]]
    came_last: dict[Charge, int]
    calls: dict[Charge, int]

    def mean(self, world_size: int) -> dict[Charge, float]:
        """Seconds that the other ranks waited, on average."""
        total: dict[Charge, float] = {}
        for charges in self.waits.values():
            for charge, waited in charges.items():
                total[charge] = total.get(charge, 0.0) + waited
        return {charge: waited / max(1, world_size - 1) for charge, waited in total.items()}


def charge(found: Iterable[Meeting], messages: Messages) -> Charged:
    """`messages`: what of a wait is a pipeline's, and due to no rank."""
    waits: dict[int, dict[Charge, float]] = {}
    came_last: dict[Charge, int] = {}
    calls: dict[Charge, int] = {}
    owed: dict[int, dict[int, float]] = {}  # by rank, what it has waited so far, by whom it was due to
    for meeting in found:
        last, axis = meeting.last, meeting.group.axis
        if last is None:
            continue
        if meeting.sender < 0:
            came_last[axis, last] = came_last.get((axis, last), 0) + 1
            for rank in meeting.ranks:
                calls[axis, rank] = calls.get((axis, rank), 0) + 1
        late = dict(owed.get(last, {}))
        for rank, seconds in meeting.waits.items():
            waited = seconds - messages.common(meeting, rank)
            if waited <= 0:
                continue
            own = owed.setdefault(rank, {})
            for root, due in _due(waited, late, own, last, rank):
                own[root] = own.get(root, 0.0) + due
                charged = waits.setdefault(rank, {})
                charged[axis, root] = charged.get((axis, root), 0.0) + due
    return Charged(waits, came_last, calls)


def _due(
    waited: float, late: dict[int, float], own: dict[int, float], last: int, rank: int
) -> Iterator[tuple[int, float]]:
    """To whom a wait is due: those for whom the last one waited and this rank did not, then the last one itself."""
    inherited = {root: seconds - own.get(root, 0.0) for root, seconds in late.items() if root != rank}
    inherited = {root: seconds for root, seconds in inherited.items() if seconds > 0}
    whole = sum(inherited.values())
    share = min(1.0, waited / whole) if whole else 0.0
    yield from ((root, seconds * share) for root, seconds in inherited.items())
    if waited > whole:
        yield last, waited - whole


class Messages:
    """Split pipeline waits that no single rank causes into schedule and stage waits.

    A wait for a message counts as far as all replicas of the stage waited equally. A wait for a rank of another stage
    counts as far as all ranks of that stage were late. `jobs.runs.diagnosis.events.pipes` uses the result.
    """

    def __init__(self, found: Iterable[Meeting], stage_of: Callable[[int], int]) -> None:
        self._stage_of = stage_of
        self._least: dict[tuple[int, int, int, bool], float] = {}
        for meeting in found:
            for rank in meeting.ranks if meeting.sender >= 0 else ():
                key, waited = self._key(meeting, rank), meeting.waits.get(rank, 0.0)
                self._least[key] = min(waited, self._least.get(key, waited))

    def common(self, meeting: Meeting, rank: int) -> float:
        """Of what a rank waited in a meeting, seconds."""
        if meeting.sender >= 0:
            return self._least[self._key(meeting, rank)]
        assert meeting.last is not None
        stage = self._stage_of(meeting.last)
        if self._stage_of(rank) == stage:
            return 0.0
        first = min(arrival for other, arrival in meeting.arrivals.items() if self._stage_of(other) == stage)
        return max(0.0, meeting.waits[rank] - (meeting.arrived - first))

    def _key(self, meeting: Meeting, rank: int) -> tuple[int, int, int, bool]:
        other = next(one for one in meeting.ranks if one != rank)
        return self._stage_of(rank), self._stage_of(other), meeting.sequence, rank == meeting.sender
