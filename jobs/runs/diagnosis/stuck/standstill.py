"""Who waits for whom while nothing ends: from where each rank stands in its groups, to those who wait for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from contracts.telemetry.health import GroupProgress, StallItem
from contracts.telemetry.vocabulary import Op
from jobs.runs.diagnosis.events.step import PAIRED, Group, Step


class Blocked(NamedTuple):
    """A rank in a collective that does not end. `sequence`: the how manieth of its group; of a message None, for those
    are counted by pairs. `missing`: ranks of the group that have not come to it."""

    rank: int
    group: Group
    op: Op
    sequence: int | None
    payload_bytes: int
    missing: tuple[int, ...]


class Knot(NamedTuple):
    """Why nothing ends. `roots`: for whom the others wait. `at`: the collective that they wait in, of those who do."""

    kind: str  # "missing": roots stand outside of any; "skipped", "mismatch"; "transfer": all are there, nobody ends
    roots: tuple[int, ...]
    at: Blocked
    waiting: tuple[int, ...]


def untie(standing: Mapping[int, StallItem], world_size: int, last: Step | None) -> Knot | None:
    """None where nobody is in a collective."""
    issued = _issued(standing)
    blocked = {rank: one for rank, item in standing.items() if (one := _blocked(item, issued)) is not None}
    if not blocked:
        return None
    roots = _roots(blocked, world_size)
    if roots:
        first = _commonest(one for one in blocked.values() if set(one.missing) & roots) or _commonest(blocked.values())
        assert first is not None
        return Knot("missing", tuple(sorted(roots)), first, tuple(sorted(blocked)))
    return _apart(blocked, last) or _transfer(blocked) or _skipped(blocked, standing, last) or _message(blocked)


def group_of(standing: GroupProgress) -> Group:
    told = standing["group"]
    return Group(told["axis"], tuple(told["ranks"]), told["nth"])


def _issued(standing: Mapping[int, StallItem]) -> dict[tuple[int, Group], int]:
    return {(rank, group_of(one)): one["issued"] for rank, item in standing.items() for one in item["groups"]}


def _blocked(item: StallItem, issued: Mapping[tuple[int, Group], int]) -> Blocked | None:
    """What the training thread waits for; where nobody saw it wait, the oldest collective that is on its way. A message
    may be on its way long before anybody waits for it."""
    flying = [one for one in item["groups"] if "op" in one and (one.get("blocking") or one["op"] not in PAIRED)]
    if not flying:
        return None
    one = min(flying, key=lambda one: (not one.get("blocking", False), one.get("since", 0.0)))
    group, op, rank = group_of(one), one["op"], item["rank"]
    if op in PAIRED:
        missing = (one["peer"],) if "peer" in one else _neighbours(group, rank)
        return Blocked(rank, group, op, None, one.get("payload_bytes", 0), missing)
    sequence = one.get("sequence", one["ended"] + 1)
    missing = tuple(other for other in group.ranks if issued.get((other, group), 0) < sequence and other != rank)
    return Blocked(rank, group, op, sequence, one.get("payload_bytes", 0), missing)


def _neighbours(group: Group, rank: int) -> tuple[int, ...]:
    """Those before and after it: a pipeline's messages go to one of them."""
    place = group.ranks.index(rank) if rank in group.ranks else 0
    return tuple(group.ranks[i] for i in (place - 1, place + 1) if 0 <= i < len(group.ranks) and i != place)


def _roots(blocked: Mapping[int, Blocked], world_size: int) -> set[int]:
    """Ranks that somebody waits for and that wait in no collective themselves. Of a message's two possible ends the one
    that waits itself is none."""
    waited_for = {rank for one in blocked.values() for rank in one.missing if rank < world_size}
    return waited_for - set(blocked)


def _commonest(found: Iterable[Blocked]) -> Blocked | None:
    """Of the collectives that ranks are in, the one with most of them."""
    told = list(found)
    if not told:
        return None
    often = Counter((one.group, one.sequence) for one in told)
    key = often.most_common(1)[0][0]
    return next(one for one in told if (one.group, one.sequence) == key)


def _together(blocked: Mapping[int, Blocked]) -> Iterator[list[Blocked]]:
    by: dict[tuple[Group, int], list[Blocked]] = {}
    for one in blocked.values():
        if one.sequence is not None:
            by.setdefault((one.group, one.sequence), []).append(one)
    yield from by.values()


def _apart(blocked: Mapping[int, Blocked], last: Step | None) -> Knot | None:
    """The same collective by its number, but not the same one: unlike ops or sizes."""
    for met in _together(blocked):
        kinds = Counter((one.op, _size(one)) for one in met)
        if len(kinds) == 1:
            continue
        (usual, _), (odd, _) = kinds.most_common(2)
        if list(kinds.values()).count(kinds[usual]) == len(kinds) and last is not None:
            odd, usual = _later(last, met[0].group, odd, usual)
        wrong = tuple(sorted(one.rank for one in met if (one.op, _size(one)) == odd))
        at = next(one for one in met if (one.op, _size(one)) == usual)
        after = last is not None and _follows(last, at.group, usual, odd)
        others = tuple(sorted(rank for rank in blocked if rank not in wrong))
        return Knot("skipped" if after else "mismatch", wrong, at, others)
    return None


def _size(one: Blocked) -> int:
    """Bytes that all ranks of the group must agree on: in an all-to-all each sends what it has."""
    return 0 if one.op in ("all_to_all", "barrier") else one.payload_bytes


Sort = tuple[Op, int]


def _follows(last: Step, group: Group, first: Sort, second: Sort) -> bool:
    """Whether in the last step that is known a collective of the second sort came right after one of the first, the
    step's first after its last too."""
    order = _order(last, group)
    return (first, second) in zip(order, order[1:] + order[:1], strict=True)


def _later(last: Step, group: Group, one: Sort, other: Sort) -> tuple[Sort, Sort]:
    """As many ranks in each: who skipped is in the one that comes after."""
    return (one, other) if _follows(last, group, other, one) else (other, one)


def _order(last: Step, group: Group) -> list[Sort]:
    for told in last.ranks.values():
        calls = [call for call in told.calls if call.group == group and call.op not in PAIRED]
        if calls:
            return [(c.op, 0 if c.op in ("all_to_all", "barrier") else c.payload_bytes) for c in calls]
    return []


def _skipped(blocked: Mapping[int, Blocked], standing: Mapping[int, StallItem], last: Step | None) -> Knot | None:
    """All wait, and for each other: who is missing in one collective is in another one. Of them the one is to blame
    that is farthest: it left out what the others still wait in. Where nothing is known of the order of a step's calls,
    the one for whom alone most others wait."""
    met = {rank for rank, one in blocked.items() if one.sequence is not None}
    absent = {rank for other in met for rank in blocked[other].missing if rank in met}
    if not absent:
        return None

    def farthest(rank: int) -> tuple[int, int, int]:
        alone = sum(one.missing == (rank,) for one in blocked.values())
        return standing[rank]["step"], _place(blocked[rank], last), alone

    worst = max(map(farthest, absent))
    roots = tuple(sorted(rank for rank in absent if farthest(rank) == worst))
    at = _commonest(one for one in blocked.values() if set(one.missing) & set(roots) and one.rank not in roots)
    if at is None:  # they wait for nobody but each other
        at = next(one for one in blocked.values() if set(one.missing) & set(roots))
    return Knot("skipped", roots, at, tuple(sorted(set(blocked) - set(roots))))


def _place(one: Blocked, last: Step | None) -> int:
    """Of a collective among its rank's calls of a step, -1 where it is not known."""
    told = last.ranks.get(one.rank) if last is not None else None
    if told is None or one.sequence is None:
        return -1
    places = [(i, call.sequence) for i, call in enumerate(told.calls) if call.group == one.group]
    return places[(one.sequence - places[0][1]) % len(places)][0] if places else -1


def _transfer(blocked: Mapping[int, Blocked]) -> Knot | None:
    """A collective to which all have come, and which does not end: whoever waits for one of these waits for that."""
    at = _commonest(one for one in blocked.values() if one.sequence is not None and not one.missing)
    return Knot("transfer", (), at, tuple(sorted(blocked))) if at is not None else None


def _message(blocked: Mapping[int, Blocked]) -> Knot:
    """All wait, in no ring of collectives: who waits for one that waits for a message waits for that message."""
    at = _commonest(one for one in blocked.values() if one.sequence is None) or _commonest(blocked.values())
    assert at is not None
    return Knot("transfer", (), at, tuple(sorted(blocked)))
