"""Pair the collectives of all ranks: by process group and sequence number, or else by their order in a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from jobs.runs.traces.imports.common import FileEvents
from jobs.runs.traces.trace_events import POINT_TO_POINT, CollectiveCall

UNPAIRED_NTH: Final = 2**32  # times the rank plus 1 is the group number of calls that cannot be paired
MAX_DIRECTIONS: Final = 5  # of messages without a partner, in notes
_Group = tuple[str, tuple[int, ...], int]
_Place = tuple[int, int]  # part, index of the call


def pair_calls(parts: list[FileEvents]) -> tuple[list[FileEvents], list[str]]:
    """Number the calls of Kineto traces so that equal numbers of a group match on all ranks. Return notes too.

    Input calls have the sequence number of the trace, or -1. `FileEvents.groups` has the names of their process groups.
    """
    calls = [list(part.calls) for part in parts]
    for (part, index), nth in _number_groups(parts).items():
        calls[part][index] = calls[part][index]._replace(nth=nth)
    by_group: dict[_Group, dict[tuple[int, int], list[_Place]]] = defaultdict(lambda: defaultdict(list))
    num_messages: Counter[tuple[_Group, int, str]] = Counter()
    for part, part_calls in enumerate(calls):
        for index, call in enumerate(part_calls):
            if call.op in POINT_TO_POINT:
                key = call.group, call.rank, call.op  # over all steps, because a number is unique on a rank
                num_messages[key] += 1
                part_calls[index] = call._replace(sequence=num_messages[key], peer=_find_peer(call))
            else:
                by_group[call.group][call.step, call.rank].append((part, index))
    unpaired: list[tuple[int, str]] = []
    for by_step in by_group.values():
        places = [place for step_places in by_step.values() for place in step_places]
        if all(calls[part][index].sequence >= 0 for part, index in places):
            _make_sequences_unique(calls, by_step.values())
        else:
            unpaired.extend(_number_by_order(calls, by_step))
    paired = [part._replace(calls=part_calls) for part, part_calls in zip(parts, calls, strict=True)]
    return paired, [*_describe_unpaired(unpaired), *_describe_lost_messages(calls)]


def _find_peer(call: CollectiveCall) -> int:
    """Return the other rank of a message, -1 if unknown. Kineto traces do not name it."""
    if call.peer >= 0 or len(call.ranks) != 2 or call.rank not in call.ranks:
        return call.peer
    return sum(call.ranks) - call.rank


def _number_groups(parts: list[FileEvents]) -> dict[_Place, int]:
    """Return the number of each call's group among the groups with the same description and ranks.

    Names of a group differ between ranks in some traces. If each rank has one name, all names are one group.
    """
    names: dict[tuple[str, tuple[int, ...]], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    identities: dict[_Place, str] = {}
    for part, events in enumerate(parts):
        for index, (call, group) in enumerate(zip(events.calls, events.groups, strict=True)):
            # Library threads run collectives of an unknown group in any order, so operations are counted separately.
            identity = identities[part, index] = group or f"operation {call.op}"
            names[call.axis, call.ranks][call.rank].add(identity)
    numbers: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
    for key, by_rank in names.items():
        union = sorted(set().union(*by_rank.values()))
        is_one_group = max(map(len, by_rank.values())) == 1 and not any(name.startswith("operation ") for name in union)
        numbers[key] = {name: 0 if is_one_group else number for number, name in enumerate(union)}
    return {
        (part, index): numbers[(call := parts[part].calls[index]).axis, call.ranks][identity]
        for (part, index), identity in identities.items()
    }


def _make_sequences_unique(calls: list[list[CollectiveCall]], by_step: Iterable[list[_Place]]) -> None:
    """Number calls again if a rank uses a sequence number more than once, for example for coalesced collectives."""
    numbered: dict[_Place, tuple[int, int]] = {}
    has_duplicates = False
    for places in by_step:
        times_used: Counter[int] = Counter()
        for part, index in places:
            sequence = calls[part][index].sequence
            numbered[part, index] = sequence, times_used[sequence]
            has_duplicates = has_duplicates or times_used[sequence] > 0
            times_used[sequence] += 1
    if not has_duplicates:
        return
    order = {key: number for number, key in enumerate(sorted(set(numbered.values())), start=1)}
    for (part, index), key in numbered.items():
        calls[part][index] = calls[part][index]._replace(sequence=order[key])


def _number_by_order(
    calls: list[list[CollectiveCall]], by_step: dict[tuple[int, int], list[_Place]]
) -> Iterator[tuple[int, str]]:
    """Number calls by their order in a step. Yield (step, axis) if the ranks recorded different operations."""
    operations: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for (step, _), places in by_step.items():
        operations[step].add(tuple(calls[part][index].op for part, index in places))
    for (step, rank), places in by_step.items():
        is_unpaired = len(operations[step]) > 1
        for number, (part, index) in enumerate(places, start=1):
            call = calls[part][index]
            nth = call.nth + UNPAIRED_NTH * (rank + 1) if is_unpaired else call.nth
            calls[part][index] = call._replace(sequence=number, nth=nth)
            if is_unpaired:
                yield step, call.axis


def _describe_unpaired(unpaired: list[tuple[int, str]]) -> Iterator[str]:
    for axis in sorted({axis for _, axis in unpaired}):
        steps = _format_steps({step for step, other in unpaired if other == axis})
        yield (
            f"ranks recorded different collectives of {axis} in step {steps}, and the traces have no sequence numbers, "
            "so waiting times of these collectives are unknown"
        )


def _format_steps(steps: set[int]) -> str:
    return ", ".join(map(str, sorted(steps)[:5])) + (", …" if len(steps) > 5 else "")


def _describe_lost_messages(calls: list[list[CollectiveCall]]) -> Iterator[str]:
    """Describe the sends and receives whose partner is unknown, or missing in the trace of the other rank."""
    imported = {part_calls[0].rank for part_calls in calls if part_calls}
    num_unknown: Counter[str] = Counter()
    balances: dict[tuple[_Group, int, int, int], int] = defaultdict(int)  # sends minus receives of a direction
    for call in (call for part_calls in calls for call in part_calls if call.op in POINT_TO_POINT):
        if call.peer < 0:
            num_unknown[call.axis] += 1
        elif call.peer in imported:
            sender, receiver = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
            balances[call.group, call.step, sender, receiver] += 1 if call.op == "send" else -1
    for axis, count in sorted(num_unknown.items()):
        messages = f"{count:,} sends and receives of {axis}"
        yield f"the traces do not name the peers of {messages}, so their waiting times are unknown"
    lost: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for ((axis, _ranks, _nth), step, sender, receiver), balance in balances.items():
        if balance:
            side = "send" if balance > 0 else "receive"
            lost[axis, f"{side} from rank {sender} to rank {receiver}"].append((step, abs(balance)))
    for (axis, message), counts in sorted(lost.items())[:MAX_DIRECTIONS]:
        steps = _format_steps({step for step, _ in counts})
        total = sum(count for _, count in counts)
        yield f"{message} of {axis}: {total:,} without a partner in step {steps}, so waiting times are unknown"
