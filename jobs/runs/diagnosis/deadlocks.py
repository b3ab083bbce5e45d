"""Find why all ranks are blocked, from the position of each rank in its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from contracts.telemetry.health import GroupProgress, StallItem
from contracts.telemetry.vocabulary import Op
from jobs.runs.diagnosis.traced_step import POINT_TO_POINT, ProcessGroup, TracedStep


class BlockedRank(NamedTuple):
    """Describe a rank in a collective that does not complete.

    Args:
        sequence: The number of the collective in its group, None for messages, which are numbered per pair.
        missing: Ranks of the group that have not entered the collective.
    """

    rank: int
    group: ProcessGroup
    op: Op
    sequence: int | None
    payload_bytes: int
    missing: tuple[int, ...]


class Deadlock(NamedTuple):
    """Explain why all ranks are blocked.

    Args:
        kind: "missing" if the roots are outside of collectives, or "transfer" if all ranks entered one.
        roots: The ranks for which the others wait.
        at: The collective in which the others wait.
    """

    kind: Literal["missing", "skipped", "mismatch", "transfer"]
    roots: tuple[int, ...]
    at: BlockedRank
    waiting: tuple[int, ...]


def find_deadlock(standing: Mapping[int, StallItem], world_size: int, last: TracedStep | None) -> Deadlock | None:
    """Return the cause, or None if no rank is in a collective."""
    issued = _get_issued(standing)
    blocked = {rank: one for rank, item in standing.items() if (one := _find_blocking_call(item, issued)) is not None}
    if not blocked:
        return None
    roots = _find_roots(blocked, world_size)
    if roots:
        first = _find_most_common(one for one in blocked.values() if set(one.missing) & roots) or _find_most_common(
            blocked.values()
        )
        assert first is not None
        return Deadlock("missing", tuple(sorted(roots)), first, tuple(sorted(blocked)))
    return (
        _find_mismatch(blocked, last)
        or _find_stuck_transfer(blocked)
        or _find_skipped_call(blocked, standing, last)
        or _find_stuck_message(blocked)
    )


def parse_group(standing: GroupProgress) -> ProcessGroup:
    group = standing["group"]
    return ProcessGroup(group["axis"], tuple(group["ranks"]), group["nth"])


def _get_issued(standing: Mapping[int, StallItem]) -> dict[tuple[int, ProcessGroup], int]:
    return {(rank, parse_group(one)): one["issued"] for rank, item in standing.items() for one in item["groups"]}


def _find_blocking_call(item: StallItem, issued: Mapping[tuple[int, ProcessGroup], int]) -> BlockedRank | None:
    """Return the collective in which the training thread is blocked, or else the oldest that is in flight.

    A message may be in flight long before a rank waits for it.
    """
    in_flight = [
        position
        for position in item["groups"]
        if "op" in position and (position.get("blocking") or position["op"] not in POINT_TO_POINT)
    ]
    if not in_flight:
        return None
    position = min(in_flight, key=lambda position: (not position.get("blocking", False), position.get("since", 0.0)))
    group, op, rank = parse_group(position), position["op"], item["rank"]
    if op in POINT_TO_POINT:
        missing = (position["peer"],) if "peer" in position else _get_neighbors(group, rank)
        return BlockedRank(rank, group, op, None, position.get("payload_bytes", 0), missing)
    sequence = position.get("sequence", position["ended"] + 1)
    missing = tuple(other for other in group.ranks if issued.get((other, group), 0) < sequence and other != rank)
    return BlockedRank(rank, group, op, sequence, position.get("payload_bytes", 0), missing)


def _get_neighbors(group: ProcessGroup, rank: int) -> tuple[int, ...]:
    """Return the ranks before and after a rank, which exchange pipeline messages with it."""
    index = group.ranks.index(rank) if rank in group.ranks else 0
    return tuple(group.ranks[i] for i in (index - 1, index + 1) if 0 <= i < len(group.ranks) and i != index)


def _find_roots(blocked: Mapping[int, BlockedRank], world_size: int) -> set[int]:
    """Return the ranks that others wait for and that are in no collective."""
    waited_for = {rank for one in blocked.values() for rank in one.missing if rank < world_size}
    return waited_for - set(blocked)


def _find_most_common(found: Iterable[BlockedRank]) -> BlockedRank | None:
    """Return a blocked rank of the collective with the most ranks."""
    candidates = list(found)
    if not candidates:
        return None
    counts = Counter((blocked.group, blocked.sequence) for blocked in candidates)
    key = counts.most_common(1)[0][0]
    return next(blocked for blocked in candidates if (blocked.group, blocked.sequence) == key)


def _group_by_collective(blocked: Mapping[int, BlockedRank]) -> Iterator[list[BlockedRank]]:
    by_collective: dict[tuple[ProcessGroup, int], list[BlockedRank]] = {}
    for one in blocked.values():
        if one.sequence is not None:
            by_collective.setdefault((one.group, one.sequence), []).append(one)
    yield from by_collective.values()


def _find_mismatch(blocked: Mapping[int, BlockedRank], last: TracedStep | None) -> Deadlock | None:
    """Find ranks in the same collective with different operations or sizes."""
    for same_collective in _group_by_collective(blocked):
        signatures = Counter((one.op, _get_compared_bytes(one)) for one in same_collective)
        if len(signatures) == 1:
            continue
        (usual, _), (odd, _) = signatures.most_common(2)
        if list(signatures.values()).count(signatures[usual]) == len(signatures) and last is not None:
            odd, usual = _order_by_step(last, same_collective[0].group, odd, usual)
        odd_ranks = tuple(sorted(one.rank for one in same_collective if (one.op, _get_compared_bytes(one)) == odd))
        at = next(one for one in same_collective if (one.op, _get_compared_bytes(one)) == usual)
        is_later = last is not None and _is_followed_by(last, at.group, usual, odd)
        others = tuple(sorted(rank for rank in blocked if rank not in odd_ranks))
        return Deadlock("skipped" if is_later else "mismatch", odd_ranks, at, others)
    return None


def _get_compared_bytes(one: BlockedRank) -> int:
    """Return the bytes that must be equal on all ranks. An all-to-all may differ between ranks."""
    return 0 if one.op in ("all_to_all", "barrier") else one.payload_bytes


Signature = tuple[Op, int]  # operation, bytes


def _is_followed_by(last: TracedStep, group: ProcessGroup, first: Signature, second: Signature) -> bool:
    """Return True if, in the last known step, a collective `second` comes right after `first`, cyclically."""
    order = _get_call_order(last, group)
    return (first, second) in zip(order, order[1:] + order[:1], strict=True)


def _order_by_step(
    last: TracedStep, group: ProcessGroup, one: Signature, other: Signature
) -> tuple[Signature, Signature]:
    """Order two equally common collectives: the rank that skipped one is in the later one."""
    return (one, other) if _is_followed_by(last, group, other, one) else (other, one)


def _get_call_order(last: TracedStep, group: ProcessGroup) -> list[Signature]:
    for rank_step in last.ranks.values():
        calls = [call for call in rank_step.calls if call.group == group and call.op not in POINT_TO_POINT]
        if calls:
            return [(c.op, 0 if c.op in ("all_to_all", "barrier") else c.payload_bytes) for c in calls]
    return []


def _find_skipped_call(
    blocked: Mapping[int, BlockedRank], standing: Mapping[int, StallItem], last: TracedStep | None
) -> Deadlock | None:
    """Find ranks that wait for each other in different collectives.

    The rank that is farthest in the step has skipped a collective. If the order of calls is unknown, the rank for
    which most others wait is the cause.
    """
    in_collectives = {rank for rank, one in blocked.items() if one.sequence is not None}
    absent = {rank for other in in_collectives for rank in blocked[other].missing if rank in in_collectives}
    if not absent:
        return None

    def get_position(rank: int) -> tuple[int, int, int]:
        alone = sum(one.missing == (rank,) for one in blocked.values())
        return standing[rank]["step"], _get_index(blocked[rank], last), alone

    farthest_position = max(map(get_position, absent))
    roots = tuple(sorted(rank for rank in absent if get_position(rank) == farthest_position))
    at = _find_most_common(one for one in blocked.values() if set(one.missing) & set(roots) and one.rank not in roots)
    if at is None:  # the roots only wait for each other
        at = next(one for one in blocked.values() if set(one.missing) & set(roots))
    return Deadlock("skipped", roots, at, tuple(sorted(set(blocked) - set(roots))))


def _get_index(one: BlockedRank, last: TracedStep | None) -> int:
    """Return the index of a collective among its rank's calls of a step, -1 if it is unknown."""
    rank_step = last.ranks.get(one.rank) if last is not None else None
    if rank_step is None or one.sequence is None:
        return -1
    indexes = [(i, call.sequence) for i, call in enumerate(rank_step.calls) if call.group == one.group]
    return indexes[(one.sequence - indexes[0][1]) % len(indexes)][0] if indexes else -1


def _find_stuck_transfer(blocked: Mapping[int, BlockedRank]) -> Deadlock | None:
    """Find a collective that all ranks entered and that does not complete."""
    at = _find_most_common(one for one in blocked.values() if one.sequence is not None and not one.missing)
    return Deadlock("transfer", (), at, tuple(sorted(blocked))) if at is not None else None


def _find_stuck_message(blocked: Mapping[int, BlockedRank]) -> Deadlock:
    """Find a message for which, directly or not, all ranks wait."""
    at = _find_most_common(one for one in blocked.values() if one.sequence is None) or _find_most_common(
        blocked.values()
    )
    assert at is not None
    return Deadlock("transfer", (), at, tuple(sorted(blocked)))
