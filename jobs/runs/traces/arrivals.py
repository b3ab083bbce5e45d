"""Who came last to a collective: what its other ranks waited is apart from what the transfer took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from jobs.runs.traces.shapes import Call, Group, Span

PAIRED = {"send", "recv"}
Key = tuple[Group, object]


class Arrival(NamedTuple):
    """When and by which rank a collective was whole, and a number of its own."""

    time: float
    rank: int
    number: int


OwnKey = tuple[int, Group, int, str, int]
Arrivals = dict[OwnKey, Arrival]


def arrival_of(event: Call | Span, arrivals: Arrivals) -> Arrival | None:
    """When the collective of an event was whole; None of compute, and where that is not known."""
    return arrivals.get(_key(event)) if isinstance(event, Call) else None


def _key(call: Call) -> OwnKey:
    """One of a rank's own: sends and receives are numbered for each peer by itself."""
    return call.rank, call.group, call.sequence, call.op, call.peer


def meetings(calls: Iterable[Call]) -> Arrivals:
    """By call of a rank: the last arrival. A collective of which a rank told nothing has none."""
    met: dict[Key, list[Call]] = defaultdict(list)
    between: dict[tuple[Group, int, int, str], int] = defaultdict(int)
    for call in sorted(calls, key=lambda call: (call.issued, call.sequence)):
        if call.op not in PAIRED:
            met[call.group, (call.step, call.sequence)].append(call)
            continue
        way = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
        between[call.group, *way, call.op] += 1
        met[call.group, (call.step, *way, between[call.group, *way, call.op])].append(call)
    found: Arrivals = {}
    for number, (key, together) in enumerate(met.items(), start=1):
        wanted = 2 if together[0].op in PAIRED else len(key[0][1])
        if len({call.rank for call in together}) < wanted:
            continue
        last = max(together, key=lambda call: call.issued)
        arrival = Arrival(last.issued, last.rank, number)
        found |= {_key(call): arrival for call in together}
    return found
