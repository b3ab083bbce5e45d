"""Find out which rank waits for which rank, from the positions of ranks in their process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from contracts.telemetry.items import GroupProgress, StallItem, find_user_frame
from jobs.runs.diagnosis.traced_step import POINT_TO_POINT, ProcessGroup, TracedStep

RENDEZVOUS_FRAMES = (" in init_process_group", " in new_group", " in _new_group_with_tag", " in split_group")
FIRST_RENDEZVOUS = "init_process_group"
RENDEZVOUS = "rendezvous"  # of ranks that create a process group


class BlockedRank(NamedTuple):
    """Describe a rank in a collective that does not complete. `missing`: ranks that have not entered it.

    `call` describes the operation with its size, and `place` is the line of the user's code.
    """

    rank: int
    group: ProcessGroup
    op: str
    sequence: int | None  # None for messages, which are numbered per pair
    payload_bytes: int
    missing: tuple[int, ...]
    call: str = ""
    place: str = ""
    is_waiting: bool = True  # the training thread is known to wait for it


class Deadlock(NamedTuple):
    """Explain why all ranks are blocked.

    "missing": the roots are outside of collectives. "transfer": no rank is missing.
    """

    kind: Literal["missing", "skipped", "mismatch", "transfer"]
    roots: tuple[int, ...]  # for which the others wait
    at: BlockedRank  # the collective in which the others wait
    waiting: tuple[int, ...]
    calls: Mapping[int, str] = {}  # of a mismatch, by rank


class Positions:
    """Positions of ranks: last reports of ranks without progress, and the collectives that ranks have issued."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._issued: dict[int, dict[ProcessGroup, int]] = {}  # by rank
        self._recent: dict[int, dict[ProcessGroup, dict[int, str]]] = {}  # texts by rank and sequence number

    def add(self, item: StallItem) -> None:
        """Store the position of a rank, which is a lower limit of its later positions.

        It replaces the last report of the rank, because a group can get another label.
        """
        issued, recent_by_group = dict[ProcessGroup, int](), dict[ProcessGroup, dict[int, str]]()
        for progress in item["groups"]:
            group = parse_group(progress)
            issued[group] = progress["issued"]
            if recent := progress.get("recent"):
                first = progress["issued"] - len(recent) + 1
                recent_by_group[group] = {first + i: text for i, text in enumerate(recent)}
        self.set_calls(item["rank"], issued, recent_by_group)

    def set_calls(self, rank: int, issued: dict[ProcessGroup, int], recent: dict[ProcessGroup, dict[int, str]]) -> None:
        """Store the number of the last call of a rank per group, and the texts of its known calls by their numbers."""
        self._issued[rank], self._recent[rank] = issued, recent

    def has_issued(self, rank: int, group: ProcessGroup, sequence: int) -> bool:
        return self._issued.get(rank, {}).get(group, 0) >= sequence

    def find_difference(self, ranks: Iterable[int]) -> tuple[ProcessGroup, int, dict[int, str]] | None:
        """Return the first call of a group in which these ranks differ: group, sequence number, texts by rank."""
        return min(self.find_differences(ranks), key=lambda one: one[1], default=None)

    def find_differences(self, ranks: Iterable[int]) -> list[tuple[ProcessGroup, int, dict[int, str]]]:
        """Return the first call in which these ranks differ, for each group with different calls."""
        found = []
        reported = [rank for rank in ranks if rank in self._recent]
        for group in {group for rank in reported for group in self._recent[rank]}:
            windows = {rank: self._recent[rank][group] for rank in reported if group in self._recent[rank]}
            if difference := _find_first_difference(windows):
                found.append((group, *difference))
        return found

    def is_followed_by(self, group: ProcessGroup, first: str, second: str, before: int) -> bool:
        """Return True if a rank called `second` right after `first` before the call number `before`."""
        windows = [groups.get(group, {}) for groups in self._recent.values()]
        return any(
            window.get(number - 1) == first and text == second
            for window in windows
            for number, text in window.items()
            if number < before
        )

    def is_first_call(self, group: ProcessGroup, rank: int, sequence: int) -> bool:
        """Return True if a rank has not called this operation before, as far as is known."""
        window = self._recent.get(rank, {}).get(group, {})
        return all(text != window.get(sequence) for number, text in window.items() if number < sequence)


def _find_first_difference(ranks: Mapping[int, Mapping[int, str]]) -> tuple[int, dict[int, str]] | None:
    if len(ranks) < 2:
        return None
    for number in sorted({number for window in ranks.values() for number in window}):
        texts = {rank: window[number] for rank, window in ranks.items() if number in window}
        if len(set(texts.values())) > 1:
            return number, texts
    return None


def find_deadlock(standing: Mapping[int, StallItem], positions: Positions, last: TracedStep | None) -> Deadlock | None:
    """Return the cause, or None if no rank waits for another."""
    blocked = {rank: one for rank, item in standing.items() if (one := _find_blocking_call(item, positions))}
    if not blocked:
        return _find_rendezvous(standing, positions.world_size)
    if different := _find_different_calls(standing, blocked, positions) or _find_mismatch(blocked, last):
        return different
    waited_for = {rank for one in blocked.values() for rank in one.missing if rank < positions.world_size}
    if roots := waited_for - set(blocked):
        first = _find_most_common(one for one in blocked.values() if set(one.missing) & roots) or _find_most_common(
            blocked.values()
        )
        assert first is not None
        return Deadlock("missing", tuple(sorted(roots)), first, tuple(sorted(blocked)))
    stuck_call = _find_most_common(one for one in blocked.values() if one.sequence is not None and not one.missing)
    stuck_message = _find_most_common(one for one in blocked.values() if one.sequence is None)
    return (
        _make_stuck(blocked, stuck_call)
        or _find_skipped_call(blocked, standing, last)
        or _make_stuck(blocked, stuck_message or _find_most_common(blocked.values()))
    )


def _make_stuck(blocked: Mapping[int, BlockedRank], at: BlockedRank | None) -> Deadlock | None:
    return Deadlock("transfer", (), at, tuple(sorted(blocked))) if at is not None else None


def parse_group(standing: GroupProgress) -> ProcessGroup:
    group = standing["group"]
    return ProcessGroup(group["axis"], tuple(group["ranks"]), group["nth"])


def format_group(group: ProcessGroup) -> str:
    """Return "dp", or "dp, group 2" for the second group with this name and these ranks."""
    return group.axis if not group.nth else f"{group.axis}, group {group.nth + 1}"


def get_place(stack: Iterable[str]) -> str:
    """Return "train.py:12 in evaluate" for the innermost line of the user's code, or "" if none is known."""
    frame, _, name = find_user_frame([*stack]).rpartition(" in ")
    file, _, line = frame.rpartition(":")
    if not file:
        return ""
    return f"{PurePosixPath(file).name}:{line}" + ("" if name == "<module>" else f" in {name}")


def _find_blocking_call(item: StallItem, positions: Positions) -> BlockedRank | None:
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
    call, place = position.get("call", op), get_place(item["stack"])
    is_waiting, num_bytes = position.get("blocking", False), position.get("payload_bytes", 0)
    if op in POINT_TO_POINT:
        index = group.ranks.index(rank) if rank in group.ranks else 0
        neighbors = tuple(group.ranks[i] for i in (index - 1, index + 1) if 0 <= i < len(group.ranks) and i != index)
        missing = (position["peer"],) if "peer" in position else neighbors  # which exchange pipeline messages
        return BlockedRank(rank, group, op, None, num_bytes, missing, call, place, is_waiting)
    sequence = position.get("sequence", position["ended"] + 1)
    missing = tuple(other for other in group.ranks if not positions.has_issued(other, group, sequence))
    missing = tuple(other for other in missing if other != rank)
    return BlockedRank(rank, group, op, sequence, num_bytes, missing, call, place, is_waiting)


def _find_rendezvous(standing: Mapping[int, StallItem], world_size: int) -> Deadlock | None:
    """Find ranks that wait in the creation of a process group for ranks that do something else."""
    waiting = {
        rank: item
        for rank, item in standing.items()
        if any(line.endswith(RENDEZVOUS_FRAMES) and "distributed_c10d.py" in line for line in item["stack"])
    }
    roots = tuple(rank for rank in range(world_size) if rank not in waiting)
    if not waiting or not roots:
        return None
    rank, item = min(waiting.items())
    frame = next(line for line in reversed(item["stack"]) if line.endswith(RENDEZVOUS_FRAMES))
    group = ProcessGroup("world", tuple(range(world_size)), 0)
    call = frame.rpartition(" in ")[2].replace("_new_group_with_tag", "new_group")
    at = BlockedRank(rank, group, RENDEZVOUS, None, 0, roots, call, get_place(item["stack"]))
    return Deadlock("missing", roots, at, tuple(sorted(waiting)))


def _find_most_common(found: Iterable[BlockedRank]) -> BlockedRank | None:
    """Return a blocked rank of the collective with the most ranks."""
    candidates = list(found)
    if not candidates:
        return None
    counts = Counter((blocked.group, blocked.sequence) for blocked in candidates)
    key = counts.most_common(1)[0][0]
    return next(blocked for blocked in candidates if (blocked.group, blocked.sequence) == key)


def _find_different_calls(
    standing: Iterable[int], blocked: Mapping[int, BlockedRank], positions: Positions
) -> Deadlock | None:
    """Find the first call in which ranks of a group differ, also if a rank has left this call."""
    difference = positions.find_difference(standing)
    if difference is None:
        return None
    group, sequence, calls = difference
    kind, odd = judge_difference(positions, group, sequence, calls)
    usual_rank = min(rank for rank in calls if rank not in odd)
    blocked_here = [one for rank, one in blocked.items() if rank in calls and one.group == group]
    if not blocked_here:  # the difference has blocked no rank
        return None
    at = next((one for one in blocked_here if one.rank not in odd), blocked_here[0])
    call = calls[usual_rank]
    at = at._replace(sequence=sequence, call=call, op=call.partition(" ")[0], missing=())
    return Deadlock(kind, odd, at, tuple(sorted(set(blocked) - set(odd))), calls)


def judge_difference(
    positions: Positions, group: ProcessGroup, sequence: int, calls: Mapping[int, str]
) -> tuple[Literal["skipped", "mismatch"], tuple[int, ...]]:
    """Return whether ranks skipped a call or made another one, and these ranks."""
    counts = Counter(calls.values())
    (usual, _), (odd, _) = counts.most_common(2)
    is_tie = counts[usual] == counts[odd]
    odd_rank, usual_rank = (next(rank for rank in calls if calls[rank] == text) for text in (odd, usual))
    is_later = positions.is_followed_by(group, usual, odd, sequence)
    if is_tie and not is_later:
        if positions.is_followed_by(group, odd, usual, sequence):
            odd, usual, is_later = usual, odd, True
        elif positions.is_first_call(group, usual_rank, sequence) > positions.is_first_call(group, odd_rank, sequence):
            odd, usual = usual, odd  # an operation that is new is the unusual one
    kind: Literal["skipped", "mismatch"] = "skipped" if is_later else "mismatch"
    return kind, tuple(sorted(rank for rank in calls if calls[rank] == odd))


def _find_mismatch(blocked: Mapping[int, BlockedRank], last: TracedStep | None) -> Deadlock | None:
    """Find ranks in the same collective with different operations or sizes."""
    by_collective: dict[tuple[ProcessGroup, int], list[BlockedRank]] = {}
    for one in blocked.values():
        if one.sequence is not None:
            by_collective.setdefault((one.group, one.sequence), []).append(one)
    for same_collective in by_collective.values():
        signatures = Counter((one.op, _get_compared_bytes(one)) for one in same_collective)
        if len(signatures) == 1:
            continue
        (usual, _), (odd, _) = signatures.most_common(2)
        is_tie = list(signatures.values()).count(signatures[usual]) == len(signatures)
        if is_tie and last is not None and not _is_followed_by(last, same_collective[0].group, usual, odd):
            odd, usual = usual, odd  # the rank that skipped one of two collectives is in the later one
        odd_ranks = tuple(sorted(one.rank for one in same_collective if (one.op, _get_compared_bytes(one)) == odd))
        at = next(one for one in same_collective if (one.op, _get_compared_bytes(one)) == usual)
        is_later = last is not None and _is_followed_by(last, at.group, usual, odd)
        others = tuple(sorted(rank for rank in blocked if rank not in odd_ranks))
        return Deadlock("skipped" if is_later else "mismatch", odd_ranks, at, others)
    return None


def _get_compared_bytes(one: BlockedRank) -> int:
    """Return the bytes that must be equal on all ranks. An all-to-all may differ between ranks."""
    return 0 if one.op in ("all_to_all", "barrier") else one.payload_bytes


Signature = tuple[str, int]  # operation, bytes


def _is_followed_by(last: TracedStep, group: ProcessGroup, first: Signature, second: Signature) -> bool:
    """Return True if, in the last known step, a collective `second` comes right after `first`, cyclically."""
    order = _get_call_order(last, group)
    return (first, second) in zip(order, order[1:] + order[:1], strict=True)


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
