"""Places queued jobs: reads queue and hosts, lets `placement` decide, and writes that down in bulk.

Deciding holds no lock. Writing does, for one short transaction in which each job placed must still be queued as that
attempt and no other scheduler may have written since we read. A row that somebody else is changing is not waited for:
the next pass sees it again.

Where the checkpoint lies that a retry goes on from, and who sends it there where no host of the retry has it.

Store the reasons that jobs wait, for thousands of jobs at once.
"""

from __future__ import annotations

import gc
import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import CharField, F, Func, JSONField, TextField, Value
from django.utils import timezone

from contracts.control import VERSION, Gang, LaunchOrder, Node
from contracts.names import TASK_LAUNCH, host_queue
from jobs.models import Attempt, Cursor, Host, Job, KeptHost, Loan, Member, Outbox, SlotAllocation
from jobs.queue import lifecycle, termination
from jobs.queue.orders import create_loans, find_newest_checkpoint, order, spec_for_hosts
from jobs.queue.scheduling.placement import decide, explain_decision
from jobs.queue.scheduling.snapshot import (
    QUEUE_PAUSED,
    QueueEntry,
    is_queue_paused,
    load_hosts,
    load_queue,
    load_quotas,
    lock_startable_jobs,
)
from jobs.queue.scheduling.states import Placement, Share

log = logging.getLogger(__name__)

LOCK = "scheduler"  # its position is another one after each write of a pass
MAX_STARTS_BEFORE_REASONS = 200  # jobs started in one pass: who gives way, and why others wait, is left to the next

KeptHosts = dict[str, tuple[str, ...]]  # by job: names of hosts


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
            raise StaleError("another scheduler wrote first")
        self._seen = uuid.uuid4().hex  # another one each time: who read between two writes must notice the second
        Cursor.objects.filter(name=LOCK).update(position=self._seen)


class StaleError(Exception):
    """A decision came too late."""


@contextmanager
def uncollected() -> Iterator[None]:
    """A long queue is a hundred thousand objects that live to the end of a pass: to look through them for garbage
    again and again was a quarter of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@uncollected()
def schedule(trouble: str = "") -> int:
    """Place what fits and say why the rest waits; returns how many jobs were placed.

    `trouble`: why a host may be well and yet not heard of.
    """
    now = timezone.now()
    turn = Turn(Cursor.objects.filter(name=LOCK).values_list("position", flat=True).first() or "")
    hosts = load_hosts(now)
    queue = load_queue(now)
    if not queue:
        return 0
    if is_queue_paused():
        store_wait_reasons(queue, {queued.job.id: QUEUE_PAUSED for queued in queue})
        return 0
    found = decide([queued.job for queued in queue if not queued.block_reason], hosts.values(), trouble, load_quotas())
    keys = {host.name: key for key, host in hosts.items()}
    by_id = {queued.job.id: queued for queued in queue}
    placed = 0
    try:
        _keep(
            found.head_hosts,
            {queued.job.id: queued.job.head_hosts for queued in queue if queued.job.head_hosts},
            keys,
            turn,
        )
        for begin in range(0, len(found.placements), JOBS_PER_TRANSACTION):
            placed += _start(found.placements[begin : begin + JOBS_PER_TRANSACTION], by_id, keys, turn)
    except (IntegrityError, StaleError) as error:
        log.warning("This scheduling pass ended early, and the next pass continues: %s", error)
        return placed
    if placed >= MAX_STARTS_BEFORE_REASONS:
        return placed
    plan = explain_decision(found)
    for each in plan.preemptions:
        termination.preempt(each.victim, each.for_job, by_id[each.for_job].job.name)
    store_wait_reasons(queue, plan.reasons)
    return placed


def resend_launch_order(job: Job, member: Member) -> None:
    """Write the order to the outbox; the host starts an attempt once however often it is told, and whoever lends it a
    checkpoint does that once."""
    members = list(member.attempt.members.select_related("host"))
    slots = sorted(member.allocations.values_list("slot", flat=True))
    _order(job, member, slots, _nodes(members)).save()
    if member.node == 0 and (loan := Loan.objects.filter(attempt=member.attempt).first()):
        order(loan).save()


def _keep(now: KeptHosts, before: KeptHosts, keys: dict[str, int], turn: Turn) -> None:
    """Remember which hosts are kept for whom. Raises StaleError."""
    if {job: set(hosts) for job, hosts in now.items()} == {job: set(hosts) for job, hosts in before.items()}:
        return
    with transaction.atomic():
        turn.take()
        KeptHost.objects.all().delete()
        KeptHost.objects.bulk_create(
            KeptHost(job_id=job, host_id=keys[host]) for job, hosts in now.items() for host in hosts
        )


def _start(placements: list[Placement], queue: dict[str, QueueEntry], keys: dict[str, int], turn: Turn) -> int:
    """Start what is still queued and whose owner still may, all of it or nothing; returns how many jobs started.

    Raises:
        StaleError: another scheduler wrote first.
        IntegrityError: a slot or an attempt is there already, or a host is gone.
    """
    now = timezone.now()
    with transaction.atomic():
        turn.take()
        allowed = lock_startable_jobs({p.job: (queue[p.job].job.owner, queue[p.job].job.project) for p in placements})
        where = {p.job: ", ".join(share.host for share in p.shares) for p in placements if p.job in allowed}
        slots = {job: queue[job].job.num_slots for job in where}
        placed = {job: (queue[job].attempt, f"placed on {hosts}") for job, hosts in where.items()}
        started = lifecycle.start_jobs(placed, slots)
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
        hosts_of = {p.job: [share.host for share in p.shares] for p in placements}
        lent = create_loans((attempt, hosts_of[attempt.job_id]) for attempt in created)
        Outbox.objects.bulk_create([*_orders(pairs, members), *lent])
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
        spec=spec_for_hosts(job.spec),
        slots=slots,
        expires=0.0,  # set as it is sent
        owner=job.owner_id,
    )
    if len(nodes) > 1:
        order["gang"] = Gang(node=member.node, nodes=nodes, lease_s=settings.LEASE_S)
    if job.attempt > 1 and (kept := find_newest_checkpoint(job)):
        order["checkpoint"] = kept
    # An expression, so that Django sends rows: of columns as arrays, psycopg quotes a JSON letter by letter.
    arguments = Value([order], JSONField())
    return Outbox(task=TASK_LAUNCH, queue=host_queue(member.host_name), arguments=arguments)


JOBS_PER_TRANSACTION = 500  # bounds how long other writers wait


MAX_REASONS_PER_PASS = 2000


def store_wait_reasons(queue: list[QueueEntry], reasons: Mapping[str, str]) -> None:
    """Write reasons that are new, as many as a pass has time for, in transactions short enough for everybody else."""
    news = {}
    for queued in queue:
        reason = queued.block_reason or reasons.get(queued.job.id, queued.reason)
        if reason != queued.reason:
            news[queued.job.id] = reason
    waiting = list(news)[:MAX_REASONS_PER_PASS]
    for begin in range(0, len(waiting), JOBS_PER_TRANSACTION):
        with transaction.atomic():
            jobs = lifecycle.lock_queued_ids(waiting[begin : begin + JOBS_PER_TRANSACTION])
            Job.objects.filter(id__in=jobs).update(wait_reason=TextOf({job: news[job] for job in jobs}, "id"))
    lifecycle.announce(*waiting)


class TextOf(Func):
    """The text that a map has for a column. The map goes as one JSON: of a condition for each row, Django and the
    database would both make more work than of writing the rows."""

    output_field = CharField()

    def __init__(self, texts: Mapping[str, str], column: str) -> None:
        super().__init__(Value(json.dumps(texts), TextField()), F(column))

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, template="(%(expressions)s)", arg_joiner="::jsonb ->> ", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, function="json_extract", arg_joiner=", '$.' || ", **extra)
