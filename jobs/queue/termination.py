"""Stop attempts by rule, and queue jobs again after an attempt.

A stop works like a cancel. A preempted training run gets time to save a checkpoint first if it saves checkpoints.
Otherwise, the steps since its latest checkpoint are lost.
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

IDLE_CHECK_INTERVAL_S = 5.0
TELEMETRY_OVERLAP_S = 5.0  # between two checks, whose clock is not the clock of Redis
USE_INTERVAL = timedelta(minutes=1)
TRAINING_KINDS = [name for name, kind in KINDS.items() if kind.trains and not kind.shares_one_slot]
STOPPABLE = (Status.STARTING, Status.RUNNING, Status.UNREACHABLE)
StopReason = Literal["preempted", "time limit", "idle"]


class IdleWatch:
    """Stop runs that exceed their idle limit. A new controller starts counting again."""

    def __init__(self) -> None:
        self._progress: dict[tuple[str, int], tuple[int, float]] = {}  # attempt: step, and monotonic seconds
        self._checked = -IDLE_CHECK_INTERVAL_S

    def stop_idle_runs(self, client: redis.Redis) -> int:
        """Read the latest steps from telemetry, stop idle runs, and return their number."""
        now = time.monotonic()
        if now - self._checked < IDLE_CHECK_INTERVAL_S:
            return 0
        since_s, self._checked = now - self._checked + TELEMETRY_OVERLAP_S, now
        rows = Job.objects.filter(status=Status.RUNNING, idle_limit_s__isnull=False)
        limits = {(id, attempt): s for id, attempt, s in rows.values_list("id", "attempt", "idle_limit_s") if s}
        streams = {key: telemetry_stream(*key) for key in limits}
        items = read_latest_steps(client, dict.fromkeys(streams.values(), 1), since_s)
        before, self._progress = self._progress, {}
        stopped = 0
        for key, limit_s in limits.items():
            step, since = before.get(key, (-1, now))
            latest = max(map(get_completed_steps, items[streams[key]]), default=-1)
            if latest > step:
                step, since = latest, now
            self._progress[key] = step, since
            if now - since >= limit_s:
                limit = f"the idle limit of {limit_s} s (run.idle_limit_s)"
                stopped += stop(*key, "idle", f"no step ended within {limit} after step {max(step, 0)}")
        return stopped


def apply_rules() -> None:
    """Apply the rules of each controller tick that need no telemetry."""
    cancel_jobs_after_failures()
    stop_overtime_runs()
    update_project_use()


def cancel_jobs_after_failures() -> int:
    """Cancel queued jobs with a failed dependency, unless `after_failed` is "start". Return their number."""
    failed = {job: state.failed for job, state in load_dependencies().items() if state.failed}
    cancelled = 0
    for job in Job.objects.filter(id__in=list(failed)).only("id", "attempt", "spec") if failed else ():
        if job.spec.get("after_failed") == "start":
            continue
        reason = f"job {failed[job.id][0]}, a dependency, did not succeed"
        with transaction.atomic():
            if lifecycle.change_status(job.id, job.attempt, Status.CANCELLING, reason, only_from=(Status.QUEUED,)):
                cancelled += lifecycle.change_status(job.id, job.attempt, Status.CANCELLED, reason)
    return cancelled


def stop_overtime_runs() -> int:
    """Stop runs over their time limit, counted from when they were first RUNNING, and return their number."""
    changes = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), status=Status.RUNNING)
    limited = Job.objects.filter(status__in=STOPPABLE, time_limit_s__isnull=False)
    rows = limited.annotate(began=Subquery(changes.order_by("id").values("at")[:1])).filter(began__isnull=False)
    stopped = 0
    for id, attempt, limit_s, since in rows.values_list("id", "attempt", "time_limit_s", "began"):
        if limit_s is not None and timezone.now() - since >= timedelta(seconds=limit_s):
            stopped += stop(id, attempt, "time limit", f"the time limit of {limit_s} s (run.time_limit_s) is reached")
    return stopped


def update_project_use() -> None:
    """Add the slot-seconds of each project once per minute, assuming that its current slots were in use throughout."""
    now = timezone.now()
    due = list(Project.objects.filter(counted__lt=now - USE_INTERVAL))
    if not due:
        return
    slots, half_life_s = count_held_slots([project.name for project in due]), settings.SHARE_HALF_LIFE_H * 3600
    for project in due:
        seconds = (now - project.counted).total_seconds()
        used = compute_decayed_use(project.used, slots.get(project.name, 0), seconds, half_life_s)
        Project.objects.filter(pk=project.pk, counted=project.counted).update(used=used, counted=now)


def stop(job_id: str, attempt: int, why: StopReason, reason: str) -> bool:
    """Start to end a running attempt, and return whether this call did it."""
    with transaction.atomic():
        lifecycle.lock_job(job_id)
        if not lifecycle.change_status(job_id, attempt, Status.CANCELLING, reason, only_from=STOPPABLE):
            return False
        Job.objects.filter(id=job_id).update(stop=why)
    return True


def preempt(job_id: str, for_job: str, name: str) -> bool:
    """Stop a preemptible job for another job. The reason names the other job only if both have the same owner."""
    attempt = Job.objects.values_list("attempt", flat=True).filter(id=job_id, preemptible=True).first()
    if attempt is None:
        return False
    text = "preempted by a job with higher priority"
    if Job.objects.filter(id=job_id, owner__jobs__id=for_job).exists():
        text += f", {name}"
    return stop(job_id, attempt, "preempted", f"{text}, and queued again to resume from the latest checkpoint")


def list_saving_attempts(now: datetime) -> dict[tuple[str, int], datetime]:
    """Return preempted attempts that may still save a checkpoint, with their deadlines."""
    changes = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt")).order_by("-id")
    stopped = Subquery(changes.filter(status=Status.CANCELLING).values("at")[:1])
    preempted = Job.objects.filter(status=Status.CANCELLING, stop="preempted", engine="hosts", kind__in=TRAINING_KINDS)
    able = preempted.filter(Exists(changes.filter(status=Status.RUNNING)), spec__train__checkpoint_every__gt=0)
    rows = able.annotate(stopped=stopped).values_list("id", "attempt", "stopped")
    limit = timedelta(seconds=settings.SAVE_S)
    return {(id, attempt): at + limit for id, attempt, at in rows if at is not None and now < at + limit}


def finish_cancelling(job_id: str, attempt: int, reason: str, *, did_all: bool = False) -> bool:
    """End an attempt that is CANCELLING, and return whether it was. The caller has locked the job.

    The job becomes CANCELLED, or FAILED if its own limit or a failed verification ended it.

    Args:
        did_all: The attempt completed its work. A stop by rule is then dropped, and the result is False.
    """
    if did_all and Job.objects.filter(id=job_id, attempt=attempt).exclude(stop="").update(stop=""):
        return False
    change = StateChange.objects.filter(job_id=job_id, attempt=attempt, status=Status.CANCELLING).last()
    job = Job.objects.only("id", "attempt", "stop").get(id=job_id)
    status = Status.CANCELLED
    if job.stop in ("time limit", "idle") and change is not None:
        status, reason = Status.FAILED, change.reason
    elif job.stop == "preempted" and job.has_failed_verification():
        status, reason = Status.FAILED, "the job was preempted, and the verification of the run failed"
    return lifecycle.change_status(job_id, attempt, status, reason, only_from=(Status.CANCELLING,))


def requeue_if_due(job_id: str, attempt: int) -> None:
    """Queue a job again if its attempt was preempted, or failed and has retries left."""
    job = Job.objects.only("id", "attempt", "status", "stop", "spec").get(id=job_id)
    if job.attempt == attempt and (reason := job.get_retry_reason()) is not None:
        lifecycle.requeue(job_id, reason)
