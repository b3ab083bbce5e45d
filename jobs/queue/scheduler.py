"""Places queued jobs: reads queue and hosts, lets `placement` decide, and writes that down in bulk.

Deciding holds no lock. Writing does, for one short transaction in which each job placed must still be queued as that
attempt and no other scheduler may have written since we read. A row that somebody else is changing is not waited for:
the next pass sees it again.
"""

from __future__ import annotations

import logging
import uuid
from typing import NamedTuple

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef
from django.utils import timezone

from contracts.control import VERSION, LaunchOrder
from contracts.names import TASK_LAUNCH, host_queue
from jobs.models import HOST_SILENT_AFTER, Attempt, Cursor, Host, Job, Outbox, SlotAllocation, Status
from jobs.queue import lifecycle
from jobs.queue.placement import HostState, Placement, Waiting, place

log = logging.getLogger(__name__)

LOCK = "scheduler"  # its position is another one after each pass that wrote placements
KEPT = f"{LOCK}:"  # and a job: the position is the key of the host that is kept for it
CHUNK = 500  # rows of the queue written in one transaction


class Queued(NamedTuple):
    """A queued job and what is written about it."""

    job: Waiting
    attempt: int
    reason: str
    placed_before: bool  # its current attempt has been on a host, though it is queued


class _StaleError(Exception):
    """What was decided goes by what was true before."""


def schedule() -> int:
    """Place what fits and say why the rest waits; returns how many jobs were placed."""
    stored = dict(Cursor.objects.filter(name__startswith=LOCK).values_list("name", "position"))
    hosts = _hosts()
    names = {str(key): state.name for key, state in hosts.items()}
    kept = {name.removeprefix(KEPT): key for name, key in stored.items() if name.startswith(KEPT)}
    queue = _queue({job: names[key] for job, key in kept.items() if key in names})
    if not queue:
        return 0
    plan = place([queued.job for queued in queue if not queued.placed_before], hosts.values())
    keys = {state.name: key for key, state in hosts.items()}
    keep = {job: str(keys[host]) for job, host in plan.kept.items()}
    placed = 0
    if plan.placements or keep != kept:
        attempts = {queued.job.id: queued.attempt for queued in queue}
        try:
            placed = _write(plan.placements, attempts, keys, keep, seen=stored.get(LOCK, ""))
        except (IntegrityError, _StaleError) as error:
            log.warning("this pass placed nothing: %s", error)
            return 0
    _explain(queue, plan.reasons)
    return placed


def order_launch(job: Job, host: Host, slots: list[int]) -> None:
    """Write the order to the outbox; the host starts an attempt once however often it is told."""
    _order(job, host.name, slots).save()


def _queue(kept: dict[str, str]) -> list[Queued]:
    """The queue; `kept` is, by job, the host that the last pass kept for it."""
    attempts = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
    rows = Job.objects.filter(status=Status.QUEUED).values_list(
        "id", "name", "owner", "device", "num_slots", "wanted_host", "priority", "created",
        "attempt", "wait_reason", Exists(attempts),
    )  # fmt: skip
    return [Queued(Waiting(*row[:8], kept=kept.get(row[0], "")), *row[8:]) for row in rows]


def _hosts() -> dict[int, HostState]:
    """All hosts by key. A slot is free if no attempt was given it and the host names none that lives there."""
    seen_after = timezone.now() - HOST_SILENT_AFTER
    taken: dict[int, set[int]] = {}
    for host, slot in SlotAllocation.objects.values_list("host", "slot"):
        taken.setdefault(host, set()).add(slot)
    hosts = {}
    rows = Host.objects.values_list("id", "name", "device", "slots", "drained", "last_seen", "holding")
    for key, name, device, slots, drained, last_seen, holding in rows:
        held = taken.get(key, set()).union(*(alive for _job, _attempt, alive in holding))
        free = tuple(slot for slot in range(slots) if slot not in held)
        hosts[key] = HostState(name, device, slots, free, drained, live=last_seen >= seen_after)
    return hosts


def _write(
    placements: list[Placement], attempts: dict[str, int], keys: dict[str, int], keep: dict[str, str], seen: str
) -> int:
    """Start what was placed and is still queued, and keep what is kept; all of it or nothing. Returns how many started.

    Raises:
        _StaleError: another scheduler wrote since `seen` was read.
        IntegrityError: a slot or an attempt is there already, or a host is gone.
    """
    now = timezone.now()
    with transaction.atomic():
        lock, _ = Cursor.objects.select_for_update().get_or_create(name=LOCK, defaults={"position": ""})
        if lock.position != seen:
            raise _StaleError("another scheduler wrote meanwhile")
        Cursor.objects.filter(name=LOCK).update(position=uuid.uuid4().hex)
        Cursor.objects.filter(name__startswith=KEPT).delete()
        Cursor.objects.bulk_create(Cursor(name=KEPT + job, position=key) for job, key in keep.items())
        started = lifecycle.start({p.job: (attempts[p.job], f"placed on {p.host}") for p in placements})
        pairs = [(started[p.job], p) for p in placements if p.job in started]
        created = Attempt.objects.bulk_create(
            Attempt(job=job, number=job.attempt, host_id=keys[p.host], ordered=now) for job, p in pairs
        )
        SlotAllocation.objects.bulk_create(
            SlotAllocation(host_id=attempt.host_id, slot=slot, attempt=attempt)
            for attempt, (_, p) in zip(created, pairs, strict=True)
            for slot in p.slots
        )
        Outbox.objects.bulk_create(_order(job, p.host, list(p.slots)) for job, p in pairs)
    return len(pairs)


def _order(job: Job, host: str, slots: list[int]) -> Outbox:
    order = LaunchOrder(
        v=VERSION,
        job=job.id,
        attempt=job.attempt,
        spec=job.spec,
        slots=slots,
        expires=0.0,  # set as it is sent
    )
    return Outbox(task=TASK_LAUNCH, queue=host_queue(host), arguments=[order])


def _explain(queue: list[Queued], reasons: dict[str, str]) -> None:
    """Write the reasons that are new, in transactions short enough for everybody else."""
    news = {}
    for queued in queue:
        stuck = f"attempt {queued.attempt} has been on a host already: cancel the job, then queue it again"
        reason = stuck if queued.placed_before else reasons.get(queued.job.id, queued.reason)
        if reason != queued.reason:
            news[queued.job.id] = reason
    waiting = sorted(news)
    for begin in range(0, len(waiting), CHUNK):
        with transaction.atomic():
            jobs = list(lifecycle.still_queued(waiting[begin : begin + CHUNK]).only("id"))
            for job in jobs:
                job.wait_reason = news[job.id]
            Job.objects.bulk_update(jobs, ["wait_reason"])
