"""Run scheduling passes: read the queue and hosts, decide, and write the result.

Deciding holds no lock. Each short write transaction checks that the placed jobs are still queued with the same attempt
and that no other scheduler wrote. Jobs that another transaction is changing are skipped until the next pass.
"""

from __future__ import annotations

import gc
import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import CharField, F, Func, TextField, Value
from django.utils import timezone

from contracts.control import Node
from jobs.models import (
    MAX_WAIT_REASON_CHARACTERS,
    Attempt,
    Cursor,
    Host,
    Job,
    KeptHost,
    Member,
    Outbox,
    SlotAllocation,
)
from jobs.queue import lifecycle, termination
from jobs.queue.orders import build_launch_order, create_loans
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

LOCK_NAME = "scheduler"
JOBS_PER_TRANSACTION = 500  # bounds how long other writers wait
MAX_REASONS_PER_PASS = 2000
MAX_STARTS_BEFORE_REASONS = 200  # after more starts, preemptions and wait reasons are left to the next pass

HeadHosts = dict[str, tuple[str, ...]]  # names of hosts by job


class StaleError(Exception):
    """Another scheduler wrote after this pass read the queue."""


class SchedulerLock:
    """Detect whether another scheduler wrote since this pass began. The position of the lock row changes per write."""

    def __init__(self) -> None:
        self._position = Cursor.objects.filter(name=LOCK_NAME).values_list("position", flat=True).first() or ""

    def acquire(self) -> None:
        """Hold the lock until the transaction ends.

        Raises:
            StaleError: Another scheduler wrote.
        """
        lock, _ = Cursor.objects.select_for_update().get_or_create(name=LOCK_NAME, defaults={"position": ""})
        if lock.position != self._position:
            raise StaleError("another scheduler wrote first")
        self._position = uuid.uuid4().hex  # a new value, so readers between two writes notice the second one
        Cursor.objects.filter(name=LOCK_NAME).update(position=self._position)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which took a quarter of a pass with 100,000 live objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@pause_garbage_collection()
def schedule(trouble: str = "") -> int:
    """Start jobs that fit, store why the others wait, and return the number of started jobs.

    `trouble`: why silent hosts may be well.
    """
    now, lock = timezone.now(), SchedulerLock()
    hosts, queue = load_hosts(now), load_queue(now)
    if not queue:
        return 0
    if is_queue_paused():
        store_wait_reasons(queue, {entry.job.id: QUEUE_PAUSED for entry in queue})
        return 0
    decision = decide([entry.job for entry in queue if not entry.block_reason], hosts.values(), trouble, load_quotas())
    keys = {host.name: key for key, host in hosts.items()}
    entries = {entry.job.id: entry for entry in queue}
    started = 0
    try:
        before = {entry.job.id: entry.job.head_hosts for entry in queue if entry.job.head_hosts}
        _store_head_hosts(decision.head_hosts, before, keys, lock)
        for begin in range(0, len(decision.placements), JOBS_PER_TRANSACTION):
            started += _start(decision.placements[begin : begin + JOBS_PER_TRANSACTION], entries, keys, lock)
    except (IntegrityError, StaleError) as error:
        log.warning("This scheduling pass ended early, and the next pass continues: %s", error)
        return started
    if started >= MAX_STARTS_BEFORE_REASONS:
        return started
    plan = explain_decision(decision)
    for each in plan.preemptions:
        termination.preempt(each.victim, each.for_job, entries[each.for_job].job.name)
    store_wait_reasons(
        queue, {job: _add_latest_start(text, plan.latest_starts.get(job), now) for job, text in plan.reasons.items()}
    )
    return started


def _add_latest_start(reason: str, latest_s: float | None, now: datetime) -> str:
    """Add the latest start of a head to its wait reason, rounded up to a minute."""
    if latest_s is None:
        return reason
    starts = now + timedelta(seconds=max(0.0, latest_s), minutes=1)
    return f"{reason} Expected start: {starts:%H:%M} UTC at the latest, when time limits end jobs on these hosts."


def _store_head_hosts(now: HeadHosts, before: HeadHosts, keys: dict[str, int], lock: SchedulerLock) -> None:
    if {job: set(hosts) for job, hosts in now.items()} == {job: set(hosts) for job, hosts in before.items()}:
        return
    with transaction.atomic():
        lock.acquire()
        KeptHost.objects.all().delete()
        KeptHost.objects.bulk_create(
            KeptHost(job_id=job, host_id=keys[host]) for job, hosts in now.items() for host in hosts
        )


def _start(placements: list[Placement], queue: dict[str, QueueEntry], keys: dict[str, int], lock: SchedulerLock) -> int:
    """Start the jobs that are still queued and permitted, in one transaction, and return their number.

    Raises:
        StaleError: Another scheduler wrote first.
        IntegrityError: A slot or an attempt exists already, or a host was deleted.
    """
    now = timezone.now()
    with transaction.atomic():
        lock.acquire()
        allowed = lock_startable_jobs({p.job: (queue[p.job].job.owner, queue[p.job].job.project) for p in placements})
        where = {p.job: _describe_placement(p) for p in placements if p.job in allowed}
        slots = {job: queue[job].job.num_slots for job in where}
        placed = {job: (queue[job].attempt, reason) for job, reason in where.items()}
        started = lifecycle.start_jobs(placed, slots)
        pairs = [(started[p.job], p) for p in placements if p.job in started]
        created = Attempt.objects.bulk_create(
            Attempt(job=job, number=job.attempt, backfilled=p.is_backfilled) for job, p in pairs
        )
        drafts = [
            (Member(attempt=attempt, node=node, host_id=keys[share.host], host_name=share.host,
                    first_rank=first, num_ranks=ranks, ordered=now), share)
            for attempt, (job, p) in zip(created, pairs, strict=True)
            for node, share, first, ranks in _assign_ranks(job, p)
        ]  # fmt: skip
        members = Member.objects.bulk_create(member for member, _ in drafts)
        SlotAllocation.objects.bulk_create(
            SlotAllocation(host_id=keys[share.host], slot=slot, member=member)
            for member, (_, share) in zip(members, drafts, strict=True)
            for slot in share.slots
        )
        hosts_by_job = {p.job: [share.host for share in p.shares] for p in placements}
        loan_orders = create_loans((attempt, hosts_by_job[attempt.job_id]) for attempt in created)
        Outbox.objects.bulk_create([*_build_launch_orders(pairs, members), *loan_orders])
    return len(pairs)


def _describe_placement(placement: Placement) -> str:
    hosts = ", ".join(share.host for share in placement.shares)
    return f"placed on {hosts}" + (", backfilled before an earlier job" if placement.is_backfilled else "")


def _assign_ranks(job: Job, placement: Placement) -> Iterator[tuple[int, Share, int, int]]:
    """Yield each node with its share, first rank, and number of ranks. Ranks that share one slot are on one node."""
    first = 0
    for node, share in enumerate(placement.shares):
        ranks = len(share.slots) if len(placement.shares) > 1 else job.num_slots
        yield node, share, first, ranks
        first += ranks


def _build_launch_orders(pairs: list[tuple[Job, Placement]], members: list[Member]) -> Iterator[Outbox]:
    """Yield the orders of all members, which are in the order of the placements."""
    names = {member.host_name for member in members}
    addresses = dict(Host.objects.filter(name__in=names).values_list("name", "address"))
    left = iter(members)
    for job, placement in pairs:
        gang = [next(left) for _ in placement.shares]
        nodes = [Node(host=m.host_name, address=addresses[m.host_name], ranks=m.num_ranks) for m in gang]
        for member, share in zip(gang, placement.shares, strict=True):
            yield build_launch_order(job, member, list(share.slots), nodes)


def store_wait_reasons(queue: list[QueueEntry], reasons: Mapping[str, str]) -> None:
    """Store changed wait reasons, up to the limit per pass, in short transactions."""
    changed = {}
    for entry in queue:
        reason = (entry.block_reason or reasons.get(entry.job.id, entry.reason))[:MAX_WAIT_REASON_CHARACTERS]
        if reason != entry.reason:
            changed[entry.job.id] = reason
    waiting = list(changed)[:MAX_REASONS_PER_PASS]
    for begin in range(0, len(waiting), JOBS_PER_TRANSACTION):
        with transaction.atomic():
            jobs = [job.id for job in lifecycle.lock_queued(waiting[begin : begin + JOBS_PER_TRANSACTION])]
            Job.objects.filter(id__in=jobs).update(wait_reason=TextFromMap({job: changed[job] for job in jobs}, "id"))
    lifecycle.announce(*waiting)


class TextFromMap(Func):
    """Look up the text of a column's value in a map that is sent as one JSON.

    A CASE expression with a condition per row takes Django and the database longer than the update.
    """

    output_field = CharField()

    def __init__(self, texts: Mapping[str, str], column: str) -> None:
        super().__init__(Value(json.dumps(texts), TextField()), F(column))

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, template="(%(expressions)s)", arg_joiner="::jsonb ->> ", **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> tuple[str, Any]:
        return self.as_sql(compiler, connection, function="json_extract", arg_joiner=", '$.' || ", **extra)
