"""Compute which slots of hosts that are kept for a waiting job can run later jobs without a delay of that job.

The waiting job is called the head. A later job may use a kept host in two cases:

1. The time limit of the later job ends before the head starts. The head starts when its kept hosts have enough free
   slots. Each attempt on them ends at its predicted end, at the latest at its time limit. Without a time limit, an
   attempt never ends.
2. The head cannot use the slots, in whatever order the attempts on the host end. The later job needs no time limit.

In the first case, a wrong prediction delays the head at most until the time limits of the attempts on its hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jobs.queue.scheduling.states import HostState
from planner.facts.kinds import round_down

# Time limits count from the start of the ranks. An attempt also needs time to launch and to end.
BACKFILL_MARGIN_S = 60.0


class Tenant(NamedTuple):
    """An attempt on a kept host, or one slot with an unknown user.

    Both ends are in seconds since the host was read, and None without a time limit. `ends_s` is the predicted end.
    """

    slots: int
    ends_s: float | None
    limit_ends_s: float | None


class KeptSlots(NamedTuple):
    """The number of free slots of a kept host, and the attempts on its other slots."""

    free: int
    tenants: tuple[Tenant, ...]

    def add_tenant(self, slots: int, limit_ends_s: float | None) -> KeptSlots:
        """Return the slots after another attempt starts on some of the free slots."""
        return KeptSlots(self.free - slots, (*self.tenants, Tenant(slots, limit_ends_s, limit_ends_s)))


class HeadStart(NamedTuple):
    """Earliest start of a head by predicted ends, and by time limits alone. None: unknown."""

    predicted_s: float | None
    latest_s: float | None


def list_kept_slots(host: HostState, free: int, priority: int) -> KeptSlots:
    """Return the free slots and the attempts of a host that is kept for a head with this priority."""
    found = []
    for each in host.occupants:
        is_leaving = each.is_leaving_for(priority) and each.limit_ends_s is not None
        ends_s = 0.0 if is_leaving else each.ends_s
        found.append(Tenant(each.slots, ends_s, each.limit_ends_s))
    unknown = host.slots - free - sum(each.slots for each in found)
    return KeptSlots(free, (*found, *[Tenant(1, None, None)] * unknown))


def compute_head_start(num_slots: int, unit: int, hosts: Sequence[KeptSlots]) -> HeadStart:
    """Return when the hosts have enough free slots for a head. `unit` is as in `SlotDemand`."""
    predicted = [[(each.ends_s, each.slots) for each in host.tenants] for host in hosts]
    limits = [[(each.limit_ends_s, each.slots) for each in host.tenants] for host in hosts]
    free = [host.free for host in hosts]
    return HeadStart(*(_find_start(num_slots, unit, free, ends) for ends in (predicted, limits)))


def _find_start(
    num_slots: int, unit: int, free: Sequence[int], ends: Iterable[Iterable[tuple[float | None, int]]]
) -> float | None:
    left = list(free)
    events = [(at, host, slots) for host, some in enumerate(ends) for at, slots in some if at is not None]
    for at, host, slots in sorted(events):
        left[host] += slots
        if sum(_count_useful(each, num_slots, unit, len(left)) for each in left) >= num_slots:
            return at
    return None


def _count_useful(free: int, num_slots: int, unit: int, hosts: int) -> int:
    """Return how many free slots of one of the kept hosts a head can use. A single host must hold the whole head."""
    if hosts > 1:
        return round_down(free, unit)
    return num_slots if free >= num_slots else 0


def count_spare_slots(host: KeptSlots, num_slots: int, unit: int, hosts: int) -> int:
    """Return how many free slots a head cannot use, in whatever order the attempts on the host end.

    Args:
        hosts: Number of hosts that are kept for the head.
    """
    sums = 1 << host.free  # bit n: the host can have n free slots after some attempts end
    for tenant in host.tenants:
        sums |= sums << tenant.slots
    spare = host.free
    for free in range(host.free, sums.bit_length()):
        if sums >> free & 1:
            spare = min(spare, free - _count_useful(free, num_slots, unit, hosts))
    return spare
