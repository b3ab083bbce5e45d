"""Pair the collectives of all ranks: by process group and sequence number, or else by their order in a step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from jobs.runs.traces.imports.common import FileEvents
from jobs.runs.traces.trace_events import POINT_TO_POINT, CollectiveCall

UNPAIRED_NTH: Final = 2**32  # times the rank plus 1 is the group number of calls that cannot be paired
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
    num_messages: Counter[tuple[_Group, int, int, str]] = Counter()
    for part, part_calls in enumerate(calls):
        for index, call in enumerate(part_calls):
            if call.op in POINT_TO_POINT:
                key = call.group, call.step, call.rank, call.op
                num_messages[key] += 1
                part_calls[index] = call._replace(sequence=num_messages[key])
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
    return paired, list(_describe_unpaired(unpaired))


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
        steps = sorted({step for step, other in unpaired if other == axis})
        shown = ", ".join(map(str, steps[:5])) + (", …" if len(steps) > 5 else "")
        yield (
            f"ranks recorded different collectives of {axis} in step {shown}, and the traces have no sequence numbers, "
            "so waiting times of these collectives are unknown"
        )
