"""Which slots of which hosts are held, and by whose job as far as the user may know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jobs.access import listed_jobs
from jobs.models import Host, Job, SlotAllocation


class Held(NamedTuple):
    """A slot that is not free."""

    slot: int
    job: Job | None  # None: somebody else's


def held_slots(hosts: Iterable[Host], user: Any) -> dict[int, list[Held]]:
    """By host, in the order of slots."""
    found: dict[int, list[Held]] = {host.pk: [] for host in hosts}
    rows = SlotAllocation.objects.filter(host__in=found).order_by("host", "slot")
    taken = list(rows.values_list("host_id", "slot", "member__attempt__job_id"))
    visible = {job.id: job for job in listed_jobs(user).filter(id__in={job for _, _, job in taken})}
    for host, slot, job in taken:
        found[host].append(Held(slot, visible.get(job)))
    return found
