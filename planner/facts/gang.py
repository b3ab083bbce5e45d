"""What a job asks of hosts: how many slots, which of them share a host, over how many hosts at most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.facts.kinds import KINDS, num_slots
from planner.facts.spec import JobSpec


class Demand(NamedTuple):
    """Slots of a gang. `units`: what a host's share is a multiple of, the best first. `max_hosts` 0 is any number.

    The unit is what must stay inside a host: a tensor-parallel group, together with its context-parallel ones where
    hosts are large enough.
    """

    num_slots: int
    units: tuple[int, ...] = (1,)
    max_hosts: int = 1

    def unit_on(self, sizes: Iterable[int]) -> int | None:
        """The best unit with which hosts of so many slots could hold the gang, were they empty; None without one."""
        sizes = sorted(sizes, reverse=True)
        if not sizes:
            return None
        if self.num_slots <= sizes[0]:
            return self.units[0]
        return next((unit for unit in self.units if self.most(sizes, unit) >= self.num_slots), None)

    def most(self, sizes: Sequence[int], unit: int) -> int:
        """Slots that hosts of these sizes have together in multiples of the unit, the largest first."""
        largest = sorted((whole(size, unit) for size in sizes), reverse=True)
        return sum(largest[: self.max_hosts or None])


def whole(slots: int, unit: int) -> int:
    """The largest multiple of the unit that is not above so many slots."""
    return slots - slots % unit


def demand(spec: JobSpec) -> Demand:
    """What a spec asks for."""
    kind, layout, asked = KINDS[spec.kind], spec.layout, spec.resources
    units = (1,) if kind.one_slot else tuple(dict.fromkeys((layout.tp * layout.cp, layout.tp)))
    pinned = kind.one_host or asked.host is not None
    return Demand(num_slots(spec), units, 1 if pinned else asked.max_hosts or 0)
