"""Which slots of which hosts are held, and by whose job as far as the user may know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jobs.core.access import listed_jobs
from jobs.models import Host, Job, SlotAllocation
from jobs.queue.hosts.state import speaks


class Held(NamedTuple):
    """A slot that is not free."""

    slot: int
    job: Job | None  # None: somebody else's


def held_slots(hosts: Iterable[Host], user: Any) -> dict[int, list[Held]]:
    """By host, in the order of slots: those that attempts were given, and those that still live ones hold by the word
    of a host that speaks."""
    taken = {host.pk: _lived_on(host) for host in hosts}
    rows = SlotAllocation.objects.filter(host__in=taken)
    for key, slot, job in rows.values_list("host_id", "slot", "member__attempt__job_id"):
        taken[key][slot] = job
    ids = {job for slots in taken.values() for job in slots.values()}
    visible = {job.id: job for job in listed_jobs(user).filter(id__in=ids)}
    return {key: [Held(slot, visible.get(job)) for slot, job in sorted(slots.items())] for key, slots in taken.items()}


def _lived_on(host: Host) -> dict[int, str]:
    if not speaks(host):
        return {}
    return {slot: job for job, _attempt, slots in host.holding for slot in slots if slot < host.slots}
