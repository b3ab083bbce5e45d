"""Runs that take no step for longer than they may: read from their telemetry.

What the controller does by rule in each tick, before it schedules.

Attempts that the board ends by rule, and what follows an attempt: another one, or nothing.

An attempt is told to end as by a cancel. A training run that gives way is asked to save a checkpoint first, where it
saves any at all; of others, and where that takes too long, what was done since the newest checkpoint is lost.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Literal

import redis
from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Subquery
from django.utils import timezone

from contracts.names import telemetry_stream
from jobs.core.redis_client import get_completed_steps, read_latest_steps
from jobs.models import Job, Project, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.scheduling.snapshot import count_held_slots, load_dependencies
from jobs.queue.scheduling.states import compute_decayed_use
from planner.facts.kinds import KINDS

LOOKED_EVERY_S = 5.0
OVERLAP_S = 5.0  # of two looks, whose times are not Redis'

Key = tuple[str, int]  # job, attempt


class IdleWatch:
    """Since when each watched run stands at its step, by this process' own clock: a new controller counts anew."""

    def __init__(self) -> None:
        self._stood: dict[Key, tuple[int, float]] = {}
        self._looked = -LOOKED_EVERY_S

    def stop_idle_runs(self, client: redis.Redis) -> int:
        """Tell those to end that stood too long; returns how many."""
        now = time.monotonic()
        if now - self._looked < LOOKED_EVERY_S:
            return 0
        since_s, self._looked = now - self._looked + OVERLAP_S, now
        rows = Job.objects.filter(status=Status.RUNNING, idle_limit_s__isnull=False)
        limits = {(id, attempt): s for id, attempt, s in rows.values_list("id", "attempt", "idle_limit_s") if s}
        steps = _newest(client, list(limits), since_s)
        before, self._stood = self._stood, {}
        ended = 0
        for key, limit_s in limits.items():
            step, since = before.get(key, (-1, now))
            if steps[key] > step:
                step, since = steps[key], now
            self._stood[key] = step, since
            if now - since >= limit_s:
                reason = (
                    f"no step ended within the idle limit of {limit_s} s (run.idle_limit_s) after step {max(step, 0)}"
                )
                ended += stop(*key, "idle", reason)
        return ended


def _newest(client: redis.Redis, keys: list[Key], since_s: float) -> dict[Key, int]:
    """The newest step told of in the last `since_s`; -1 where none was."""
    told = read_latest_steps(client, {telemetry_stream(*key): 1 for key in keys}, since_s)
    return {key: max(map(get_completed_steps, told[telemetry_stream(*key)]), default=-1) for key in keys}


COUNTED_EVERY = timedelta(minutes=1)


def apply_rules() -> None:
    """Jobs after one that did not succeed, runs over their time limit, and what projects used."""
    end_what_comes_after_a_failure()
    end_what_ran_too_long()
    count_use()


def end_what_comes_after_a_failure() -> int:
    """Cancel queued jobs that come after one that did not succeed, but for those that start all the same."""
    failed = {job: ahead.failed for job, ahead in load_dependencies().items() if ahead.failed}
    cancelled = 0
    for job in Job.objects.filter(id__in=list(failed)).only("id", "attempt", "spec") if failed else ():
        if job.spec.get("after_failed") == "start":
            continue
        reason = f"job {failed[job.id][0]}, a dependency, did not succeed"
        with transaction.atomic():
            if lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason, only_from=(Status.QUEUED,)):
                cancelled += lifecycle.change_status(job.id, job.attempt, Status.CANCELLED, reason)
    return cancelled


def end_what_ran_too_long() -> int:
    """Tell runs to end that are over their time limit, counted from when their ranks were first told of as running."""
    began = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), status=Status.RUNNING)
    limited = Job.objects.filter(status__in=RUNS, time_limit_s__isnull=False)
    rows = limited.annotate(began=Subquery(began.order_by("id").values("at")[:1])).filter(began__isnull=False)
    ended = 0
    for id, attempt, limit_s, since in rows.values_list("id", "attempt", "time_limit_s", "began"):
        if limit_s is not None and timezone.now() - since >= timedelta(seconds=limit_s):
            ended += stop(id, attempt, "time limit", f"the time limit of {limit_s} s (run.time_limit_s) is reached")
    return ended


def count_use() -> None:
    """Once a minute: what each project used since the last time, as if it had held all along what it holds now."""
    now = timezone.now()
    due = list(Project.objects.filter(counted__lt=now - COUNTED_EVERY))
    if not due:
        return
    held, half_life_s = count_held_slots([project.name for project in due]), settings.SHARE_HALF_LIFE_H * 3600
    for project in due:
        seconds = (now - project.counted).total_seconds()
        used = compute_decayed_use(project.used, held.get(project.name, 0), seconds, half_life_s)
        Project.objects.filter(pk=project.pk, counted=project.counted).update(used=used, counted=now)


StopReason = Literal["preempted", "time limit", "idle"]
TRAINING = [name for name, kind in KINDS.items() if kind.trains and not kind.shares_one_slot]
RUNS = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE)


def stop(job_id: str, attempt: int, why: StopReason, reason: str) -> bool:
    """Tell a running attempt to end; True when this call did."""
    with transaction.atomic():
        lifecycle.lock_job(job_id)
        if not lifecycle.change_status(job_id, attempt, Status.CANCELLING, reason, only_from=RUNS):
            return False
        Job.objects.filter(id=job_id).update(stop=why)
    return True


def preempt(job_id: str, for_job: str, name: str) -> bool:
    """A preemptible job gives way; False where it has ended or was told to already."""
    attempt = Job.objects.values_list("attempt", flat=True).filter(id=job_id, preemptible=True).first()
    if attempt is None:
        return False
    text = "preempted by a job with higher priority"
    if Job.objects.filter(id=job_id, owner__jobs__id=for_job).exists():
        text += f", {name}"
    return stop(job_id, attempt, "preempted", f"{text}, and queued again to resume from the latest checkpoint")


def list_saving_attempts(now: datetime) -> dict[tuple[str, int], datetime]:
    """Attempts that were told to give way and have time to save a checkpoint first: until when."""
    changes = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt")).order_by("-id")
    told = Subquery(changes.filter(status=Status.CANCELLING).values("at")[:1])
    preempted = Job.objects.filter(status=Status.CANCELLING, stop="preempted", engine="hosts", kind__in=TRAINING)
    able = preempted.filter(Exists(changes.filter(status=Status.RUNNING)), spec__train__checkpoint_every__gt=0)
    rows = able.annotate(told=told).values_list("id", "attempt", "told")
    lasts = timedelta(seconds=settings.SAVE_S)
    return {(id, attempt): at + lasts for id, attempt, at in rows if at is not None and now < at + lasts}


def finish_cancelling(job_id: str, attempt: int, reason: str, *, did_all: bool = False) -> bool:
    """The attempt that was told to end has; False where none was, or where a rule told it so and it had done all it was
    to do. The job is locked.

    CANCELLED, but FAILED where a limit of its own ended it, nobody asked for that end, or where it was disproved as it
    gave way: nothing goes on from it.
    """
    if did_all and Job.objects.filter(id=job_id, attempt=attempt).exclude(stop="").update(stop=""):
        return False
    told = StateChange.objects.filter(job_id=job_id, attempt=attempt, status=Status.CANCELLING).last()
    job = Job.objects.only("id", "attempt", "stop").get(id=job_id)
    if job.stop in ("time limit", "idle") and told is not None:
        return lifecycle.change_status(job_id, attempt, Status.FAILED, told.reason, only_from=(Status.CANCELLING,))
    if job.stop == "preempted" and job.has_failed_verification():
        text = "the job was preempted, and the verification of the run failed"
        return lifecycle.change_status(job_id, attempt, Status.FAILED, text, only_from=(Status.CANCELLING,))
    return lifecycle.change_status(job_id, attempt, Status.CANCELLED, reason, only_from=(Status.CANCELLING,))


def requeue_if_due(job_id: str, attempt: int) -> None:
    """After the end of an attempt: queued again where it gave way, or failed and may be tried again."""
    job = Job.objects.only("id", "attempt", "status", "stop", "spec").get(id=job_id)
    if job.attempt != attempt:
        return
    if (again := job.get_retry_reason()) is not None:
        lifecycle.requeue(job_id, again)
