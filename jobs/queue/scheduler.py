"""Places queued jobs: the whole gang on one host or nothing, by priority, then age. Says why a job waits."""

from __future__ import annotations

import time
from functools import partial

from django.db import transaction
from django.utils import timezone

from contracts.control import VERSION, LaunchOrder
from contracts.names import TASK_LAUNCH, host_queue
from jobs.models import Attempt, Cursor, Host, Job, Outbox, SlotAllocation, Status
from jobs.queue import lifecycle

LOCK = "scheduler"
ORDER_LASTS_S = 60.0


def schedule() -> int:
    """Place what fits; returns how many jobs were placed. Single flight: a second call waits for the first."""
    with transaction.atomic():
        Cursor.objects.get_or_create(name=LOCK)
        Cursor.objects.select_for_update().get(name=LOCK)
        placed = 0
        blocked: dict[str, Job] = {}
        for job in Job.objects.filter(status=Status.QUEUED).order_by("-priority", "created"):
            device = job.spec["resources"]["device"]
            reason = _place(job, blocked.get(device))
            if not reason:
                placed += 1
                continue
            if not _never_fits(job):
                blocked.setdefault(device, job)
            if reason != job.wait_reason:
                Job.objects.filter(id=job.id, status=Status.QUEUED).update(wait_reason=reason[:500])
                transaction.on_commit(partial(lifecycle.announce, job.id))
    return placed


def _place(job: Job, ahead: Job | None) -> str:
    """Start the job if a host has room; otherwise the reason in words."""
    device, need = job.spec["resources"]["device"], job.num_slots
    hosts = list(Host.objects.live(device).order_by("name"))
    if not hosts:
        return f"no {device} host is connected"
    wanted = job.spec["resources"].get("host")
    if wanted is not None:
        hosts = [host for host in hosts if host.name == wanted]
        if not hosts:
            return f"{wanted}, the one host it asks for, is not connected"
        if hosts[0].drained:
            return f"{wanted}, the one host it asks for, is drained and takes no new jobs"
    open_hosts = [host for host in hosts if not host.drained]
    if not open_hosts:
        return f"every {device} host is drained and takes no new jobs"
    largest = max(host.slots for host in open_hosts)
    if need > largest:
        return f"needs {need} slots on one {device} host; the largest has {largest}"
    if ahead is not None and wanted is None:
        return f"waits behind {ahead.name} ({ahead.id}), which is next for a {device} host"
    free = {host: _free_slots(host) for host in open_hosts}
    fitting = [host for host in open_hosts if len(free[host]) >= need]
    if not fitting:
        return f"needs {need} slots on one {device} host; " + "; ".join(_occupied(h, free[h]) for h in open_hosts)
    host = min(fitting, key=lambda h: len(free[h]))  # the tightest fit keeps large holes for large jobs
    _start(job, host, free[host][:need])
    return ""


def _never_fits(job: Job) -> bool:
    slots = [host.slots for host in Host.objects.live(job.spec["resources"]["device"]).filter(drained=False)]
    return job.num_slots > max(slots, default=0)


def _free_slots(host: Host) -> list[int]:
    taken = set(host.allocations.values_list("slot", flat=True))
    return [slot for slot in range(host.slots) if slot not in taken]


def _occupied(host: Host, free: list[int]) -> str:
    holders: dict[str, int] = {}
    for name in host.allocations.values_list("attempt__job__name", flat=True):
        holders[name] = holders.get(name, 0) + 1
    held = ", ".join(f"{name} holds {count}" for name, count in holders.items())
    return f"{host.name} has {len(free)} of {host.slots} free ({held})"


def _start(job: Job, host: Host, slots: list[int]) -> None:
    if not lifecycle.change(job.id, job.attempt, Status.STARTING, f"placed on {host.name}"):
        return  # cancelled meanwhile
    attempt = Attempt.objects.create(job=job, number=job.attempt, host=host, ordered=timezone.now())
    SlotAllocation.objects.bulk_create(SlotAllocation(host=host, slot=slot, attempt=attempt) for slot in slots)
    order_launch(job, host, slots)


def order_launch(job: Job, host: Host, slots: list[int]) -> None:
    """Write the order to the outbox; the host starts an attempt once however often it is told."""
    order = LaunchOrder(
        v=VERSION, job=job.id, attempt=job.attempt, spec=job.spec, slots=slots, expires=time.time() + ORDER_LASTS_S
    )
    Outbox.objects.create(task=TASK_LAUNCH, queue=host_queue(host.name), arguments=[order])
