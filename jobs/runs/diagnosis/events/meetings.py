"""Ranks meet in a collective: who came last, what the others waited until then, and what the transfer took after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from contracts.telemetry.vocabulary import Op
from jobs.runs.diagnosis.events.clocks import Clocks
from jobs.runs.diagnosis.events.step import PAIRED, Call, Group, Step


class Meeting(NamedTuple):
    """All ranks of a group in one collective, or `sender` and the one that receives; -1 in a collective.

    `last`: who came last, None where clocks cannot tell. `arrived`: when; `arrivals`: when each rank did. `waits`: by
    rank, what it stood still for the last. `exposed`: by rank, what it stood still for the transfer, which took
    `transfer_s`: to the first end.
    """

    group: Group
    op: Op
    sequence: int
    sender: int
    ranks: tuple[int, ...]
    payload_bytes: int
    last: int | None
    arrived: float
    arrivals: dict[int, float]
    waits: dict[int, float]
    exposed: dict[int, float]
    transfer_s: float


def meetings(step: Step, clocks: Clocks) -> list[Meeting]:
    """Those of a step of which all ranks told, in the order in which they could begin."""
    nodes = {rank: one.node for rank, one in step.ranks.items()}
    found = [_meeting(calls, nodes, clocks) for calls in _met(step)]
    return sorted(found, key=lambda meeting: meeting.arrived)


def _met(step: Step) -> Iterator[list[Call]]:
    together: dict[tuple[Group, int], list[Call]] = {}
    pairs: dict[tuple[Group, int, int, int], list[Call]] = {}
    for one in step.ranks.values():
        for call in one.calls:
            if call.op not in PAIRED:
                together.setdefault((call.group, call.sequence), []).append(call)
            elif call.peer >= 0:
                ends = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
                pairs.setdefault((call.group, *ends, call.sequence), []).append(call)
    yield from (calls for (group, _), calls in together.items() if len(calls) == len(group.ranks) > 1)
    yield from (calls for calls in pairs.values() if len(calls) == 2)


def _meeting(calls: list[Call], nodes: dict[int, int], clocks: Clocks) -> Meeting:
    last = max(calls, key=lambda call: call.issued)
    others = [call for call in calls if call is not last]
    waits: dict[int, float] = {}
    known = True
    for call in others:
        apart = clocks.apart(nodes[call.rank], nodes[last.rank])
        early = last.issued - call.issued
        if early <= apart:  # it may as well have come after
            known = known and (apart == 0.0 and early > 0)
            continue
        waited = min(last.issued, call.ended) - max(call.issued, call.ended - call.blocked_s)
        if waited > 0:
            waits[call.rank] = waited
    return Meeting(
        group=last.group,
        op="send" if last.op in PAIRED else last.op,
        sequence=last.sequence,
        sender=next((call.rank for call in calls if call.op == "send"), -1),
        ranks=tuple(sorted(call.rank for call in calls)),
        payload_bytes=max(call.payload_bytes for call in calls),
        last=last.rank if known else None,
        arrived=last.issued,
        arrivals={call.rank: call.issued for call in calls},
        waits=waits if known else {},
        exposed={call.rank: max(0.0, call.blocked_s - waits.get(call.rank, 0.0)) for call in calls},
        transfer_s=max(0.0, min(call.ended for call in calls) - last.issued),
    )
