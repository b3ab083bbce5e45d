"""How a gang lies on hosts: whole or not at all, over as few as possible, each host with a multiple of one unit.

Ranks fill node after node with tp innermost, so a share that is a multiple of the unit (`planner.facts.kinds`) never
divides a group that must stay inside a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from planner.facts.kinds import SlotDemand, round_down


def spread(demand: SlotDemand, unit: int, free: Mapping[str, int], liked: str = "") -> dict[str, int] | None:
    """Slots by host, the largest share first: over as few hosts as their free slots allow; None where they cannot.

    Of the hosts that could take the last share it is the one with the fewest free slots, so that large holes stay. Of
    hosts that are as good the one that is `liked` comes first.
    """

    def turn(name: str) -> tuple[bool, str]:
        return name != liked, name

    sizes = [(round_down(slots, unit), name) for name, slots in free.items()]
    usable = sorted(sizes, key=lambda row: (-row[0], *turn(row[1])))
    usable = usable[: demand.max_hosts or None]
    reached = list(accumulate(slots for slots, _ in usable))
    fewest = next((number for number, slots in enumerate(reached, 1) if slots >= demand.num_slots), None)
    if fewest is None:
        return None
    shares = {name: slots for slots, name in usable[: fewest - 1]}
    left = demand.num_slots - sum(shares.values())
    last = min((slots, *turn(name)) for name, slots in free.items() if name not in shares and slots >= left)
    return {**shares, last[-1]: left}


class Candidate(NamedTuple):
    """A host that could be kept for a gang. `soon`: slots that are free, or will be without waiting for a job's end."""

    name: str
    slots: int
    soon: int


def to_keep(demand: SlotDemand, unit: int, hosts: Sequence[Candidate]) -> tuple[str, ...]:
    """The hosts to keep for a gang that cannot start now: as few as would hold it empty, of such sets one that needs
    few further slots to come free. Nothing where they cannot hold it.
    """
    fewest = _fewest(demand, unit, hosts)
    if fewest is None:
        return ()
    soonest = sorted(hosts, key=lambda host: (-round_down(host.soon, unit), host.slots, host.name))
    largest = sorted(hosts, key=lambda host: (-host.slots, host.name))
    chosen: list[str] = []
    slots = 0  # of those chosen
    after = {host.name for host in largest[: fewest - 1]}  # the largest, as many as are chosen after this one
    most = sum(round_down(host.slots, unit) for host in largest[: fewest - 1])  # that they could hold
    for others in reversed(range(fewest)):
        next_largest = round_down(largest[others].slots, unit)
        # This one, and the largest after it, hold the gang.
        lacking = demand.num_slots - slots - most
        one = next(
            host
            for host in soonest
            if (next_largest if host.name in after else round_down(host.slots, unit)) >= lacking
        )
        chosen.append(one.name)
        slots += round_down(one.slots, unit)
        if others:
            left_out = one if one.name in after else largest[others - 1]
            after.remove(left_out.name)
            most -= round_down(left_out.slots, unit)
        largest.remove(one)
        soonest.remove(one)
    return tuple(sorted(chosen))


def _fewest(demand: SlotDemand, unit: int, hosts: Sequence[Candidate]) -> int | None:
    if any(host.slots >= demand.num_slots for host in hosts):
        return 1
    sizes = sorted((round_down(host.slots, unit) for host in hosts), reverse=True)[: demand.max_hosts or None]
    return next((n for n, slots in enumerate(accumulate(sizes), 1) if slots >= demand.num_slots), None)
