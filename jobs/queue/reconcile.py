"""The database says what should run, each host says what does; here the two are held against each other."""

from __future__ import annotations

from datetime import timedelta

import redis
from django.db.models import Q
from django.utils import timezone

from contracts.names import cancel_key
from jobs.models import HOST_SILENT_AFTER, ON_A_HOST, Attempt, Job, Status
from jobs.queue import lifecycle
from jobs.queue.events import CANCEL_FLAG_S, known_attempts
from jobs.queue.scheduler import order_launch

ORDER_AGAIN_AFTER = timedelta(seconds=15)
LOST_AFTER = timedelta(minutes=15)


def reconcile(client: redis.Redis) -> None:
    """One pass over every job that is on a host."""
    now = timezone.now()
    known = known_attempts(client)
    jobs = Job.objects.filter(status__in=ON_A_HOST)
    current = {job.id: job for job in jobs}
    attempts = Attempt.objects.filter(job_id__in=current).select_related("host")
    for attempt in attempts:
        job = current[attempt.job_id]
        if attempt.number != job.attempt:
            continue
        if job.status == Status.CANCELLING:
            client.set(cancel_key(job.id, job.attempt), "1", ex=CANCEL_FLAG_S)
        silent_for = now - attempt.host.last_seen
        if silent_for > LOST_AFTER:
            reason = f"host {attempt.host.name} has been silent for {int(silent_for.total_seconds())} s"
            _give_up(job, reason)
        elif silent_for > HOST_SILENT_AFTER:
            reason = f"host {attempt.host.name} has been silent for {int(silent_for.total_seconds())} s"
            running = (Status.STARTING, Status.RUNNING)
            lifecycle.change(job.id, job.attempt, Status.UNREACHABLE, reason, only_from=running)
        elif attempt.exit is None and (job.id, job.attempt) not in known.get(
            attempt.host.name, {(job.id, job.attempt)}
        ):
            _unknown_to_its_host(job, attempt)


def _unknown_to_its_host(job: Job, attempt: Attempt) -> None:
    """The host lives and does not have the attempt: the order was lost on the way, or its files are gone."""
    if timezone.now() - attempt.ordered < ORDER_AGAIN_AFTER:
        return
    if job.status == Status.STARTING:
        claimed = Attempt.objects.filter(Q(pk=attempt.pk), ordered=attempt.ordered).update(ordered=timezone.now())
        if claimed:
            order_launch(job, attempt.host, sorted(attempt.allocations.values_list("slot", flat=True)))
        return
    _give_up(job, f"host {attempt.host.name} no longer knows this attempt")


def _give_up(job: Job, reason: str) -> None:
    if job.status == Status.CANCELLING:
        lifecycle.change(job.id, job.attempt, Status.CANCELLED, reason)
        return
    lifecycle.change(job.id, job.attempt, Status.LOST, reason)
