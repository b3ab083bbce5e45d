"""Places queued jobs: reads queue and hosts, lets `placement` decide, and writes that down in bulk.

Deciding holds no lock. Writing does, for one short transaction in which each job placed must still be queued as that
attempt and no other scheduler may have written since we read. A row that somebody else is changing is not waited for:
the next pass sees it again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Case, CharField, Exists, OuterRef, Value, When
from django.utils import timezone

from contracts.control import VERSION, Gang, Kept, LaunchOrder, Node
from contracts.names import TASK_LAUNCH, host_queue
from jobs.models import HOST_SILENT_AFTER, Attempt, Cursor, Host, Job, Member, Outbox, SlotAllocation, Status
from jobs.queue import lifecycle
from jobs.queue.leases import held_back
from jobs.queue.placement import place
from jobs.queue.pool import HostState, Placement, Share, Waiting

log = logging.getLogger(__name__)

LOCK = "scheduler"  # its position is another one after each write of a pass
KEPT = f"{LOCK}:"  # and a job: the position is the key of the host that is kept for it
MOST_ANNOUNCED = 50  # new reasons of which sockets are told at once; the others' look by themselves
CHUNK = 500  # jobs written in one transaction: so long do others wait, where a database has one writer


class Queued(NamedTuple):
    """A queued job and what is written about it."""

    job: Waiting
    attempt: int
    reason: str
    placed_before: bool  # its current attempt has been on a host, though it is queued


class Turn:
    """That no other scheduler wrote since this pass read."""

    def __init__(self, seen: str) -> None:
        self._seen = seen  # the LOCK row's position as it was read, then as this pass last wrote it

    def take(self) -> None:
        """Hold the lock until the transaction ends.

        Raises:
            StaleError: another scheduler wrote, so what was decided goes by what is no longer true.
        """
        lock, _ = Cursor.objects.select_for_update().get_or_create(name=LOCK, defaults={"position": ""})
        if lock.position != self._seen:
            raise StaleError("another scheduler wrote meanwhile")
        self._seen = uuid.uuid4().hex  # another one each time: who read between two writes must notice the second
        Cursor.objects.filter(name=LOCK).update(position=self._seen)


class StaleError(Exception):
    """A decision came too late."""


def schedule(trouble: str = "") -> int:
    """Place what fits and say why the rest waits; returns how many jobs were placed.

    `trouble`: why a host may be well and yet not heard of.
    """
    stored = dict(Cursor.objects.filter(name__startswith=LOCK).values_list("name", "position"))
    turn = Turn(stored.pop(LOCK, ""))
    kept = {name.removeprefix(KEPT): int(key) for name, key in stored.items()}
    hosts = _hosts()
    queue = _queue({job: hosts[key].name for job, key in kept.items() if key in hosts})
    if not queue:
        return 0
    held = held_back({queued.job.id for queued in queue if queued.attempt > 1})
    free = [queued.job for queued in queue if not queued.placed_before and queued.job.id not in held]
    plan = place(free, hosts.values(), trouble)
    keys = {host.name: key for key, host in hosts.items()}
    attempts = {queued.job.id: queued.attempt for queued in queue}
    placed = 0
    try:
        _keep({job: keys[host] for job, host in plan.kept.items()}, kept, turn)
        for begin in range(0, len(plan.placements), CHUNK):
            placed += _start(plan.placements[begin : begin + CHUNK], attempts, keys, turn)
    except (IntegrityError, StaleError) as error:
        log.warning("this pass ended early, the next one goes on: %s", error)
        return placed
    _explain(queue, {**plan.reasons, **held})
    return placed


def order_launch(job: Job, member: Member) -> None:
    """Write the order to the outbox; the host starts an attempt once however often it is told."""
    members = list(member.attempt.members.select_related("host"))
    slots = sorted(member.allocations.values_list("slot", flat=True))
    _order(job, member, slots, _nodes(members)).save()


def _queue(kept: dict[str, str]) -> list[Queued]:
    """The queue; `kept` is, by job, the host that the last pass kept for it."""
    attempts = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
    rows = Job.objects.filter(status=Status.QUEUED, engine="hosts").values_list(
        "id", "name", "owner", "device", "num_slots", "wanted_host", "priority", "created",
        "attempt", "wait_reason", Exists(attempts),
    )  # fmt: skip
    return [
        Queued(Waiting._make([*job, kept.get(job[0], "")]), attempt, reason, placed_before)
        for *job, attempt, reason, placed_before in rows
    ]


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


def _keep(now: dict[str, int], before: dict[str, int], turn: Turn) -> None:
    """Remember which hosts are kept for whom. Raises StaleError."""
    if now == before:
        return
    with transaction.atomic():
        turn.take()
        Cursor.objects.filter(name__startswith=KEPT).delete()
        Cursor.objects.bulk_create(Cursor(name=f"{KEPT}{job}", position=str(key)) for job, key in now.items())


def _start(placements: list[Placement], attempts: dict[str, int], keys: dict[str, int], turn: Turn) -> int:
    """Start what is still queued, all of it or nothing; returns how many jobs started.

    Raises:
        StaleError: another scheduler wrote meanwhile.
        IntegrityError: a slot or an attempt is there already, or a host is gone.
    """
    now = timezone.now()
    with transaction.atomic():
        turn.take()
        where = {p.job: ", ".join(share.host for share in p.shares) for p in placements}
        started = lifecycle.start({job: (attempts[job], f"placed on {hosts}") for job, hosts in where.items()})
        pairs = [(started[p.job], p) for p in placements if p.job in started]
        created = Attempt.objects.bulk_create(Attempt(job=job, number=job.attempt) for job, _ in pairs)
        drafts = [
            (Member(attempt=attempt, node=node, host_id=keys[share.host], host_name=share.host,
                    first_rank=first, num_ranks=ranks, ordered=now), share)
            for attempt, (job, p) in zip(created, pairs, strict=True)
            for node, share, first, ranks in _ranked(job, p)
        ]  # fmt: skip
        members = Member.objects.bulk_create(member for member, _ in drafts)
        SlotAllocation.objects.bulk_create(
            SlotAllocation(host_id=keys[share.host], slot=slot, member=member)
            for member, (_, share) in zip(members, drafts, strict=True)
            for slot in share.slots
        )
        Outbox.objects.bulk_create(_orders(pairs, members))
    return len(pairs)


def _ranked(job: Job, placement: Placement) -> Iterator[tuple[int, Share, int, int]]:
    """Node, share, its first rank and how many it has. Ranks that take turns in one slot are all in it."""
    first = 0
    for node, share in enumerate(placement.shares):
        ranks = len(share.slots) if len(placement.shares) > 1 else job.num_slots
        yield node, share, first, ranks
        first += ranks


def _orders(pairs: list[tuple[Job, Placement]], members: list[Member]) -> Iterator[Outbox]:
    named = {member.host_name for member in members}
    addresses = dict(Host.objects.filter(name__in=named).values_list("name", "address"))
    told = iter(members)
    for job, placement in pairs:
        of_job = [next(told) for _ in placement.shares]
        nodes = [Node(host=m.host_name, address=addresses[m.host_name], ranks=m.num_ranks) for m in of_job]
        for member, share in zip(of_job, placement.shares, strict=True):
            yield _order(job, member, list(share.slots), nodes)


def _nodes(members: list[Member]) -> list[Node]:
    return [Node(host=m.host_name, address=m.host.address if m.host else "", ranks=m.num_ranks) for m in members]


def _order(job: Job, member: Member, slots: list[int], nodes: list[Node]) -> Outbox:
    order = LaunchOrder(
        v=VERSION,
        job=job.id,
        attempt=job.attempt,
        spec=job.spec,
        slots=slots,
        expires=0.0,  # set as it is sent
        owner=job.owner_id,
    )
    if len(nodes) > 1:
        order["gang"] = Gang(node=member.node, nodes=nodes, lease_s=settings.LEASE_S)
    if job.attempt > 1 and (kept := _kept(job)):
        order["checkpoint"] = kept
    return Outbox(task=TASK_LAUNCH, queue=host_queue(member.host_name), arguments=[order])


def _kept(job: Job) -> Kept | None:
    """The newest checkpoint that an earlier attempt told of: rank 0 writes it, on the first host."""
    told = Attempt.objects.filter(job=job, number__lt=job.attempt).exclude(checkpoint="").order_by("-number")
    found = told.filter(members__node=0).values_list("checkpoint", "members__host_name").first()
    return Kept(name=found[0], host=found[1]) if found else None


def _explain(queue: list[Queued], reasons: dict[str, str]) -> None:
    """Write the reasons that are new, in transactions short enough for everybody else."""
    news = {}
    for queued in queue:
        stuck = f"attempt {queued.attempt} has been on a host already: cancel the job, then queue it again"
        reason = stuck if queued.placed_before else reasons.get(queued.job.id, queued.reason)
        if reason != queued.reason:
            news[queued.job.id] = reason
    waiting = sorted(news, key=lambda job: news[job])
    for begin in range(0, len(waiting), CHUNK):
        with transaction.atomic():
            told: dict[str, list[str]] = {}
            for job in lifecycle.lock_queued(waiting[begin : begin + CHUNK]):
                told.setdefault(news[job.id], []).append(job.id)
            if told:
                texts = [When(id__in=jobs, then=Value(text, CharField())) for text, jobs in told.items()]
                Job.objects.filter(id__in=[job for jobs in told.values() for job in jobs]).update(
                    wait_reason=Case(*texts, output_field=CharField())
                )
    lifecycle.announce(*waiting[:MOST_ANNOUNCED])
