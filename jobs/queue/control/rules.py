"""What the controller does by rule in each tick, before it schedules."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import OuterRef, Subquery
from django.utils import timezone

from jobs.models import Job, Project, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.control import stops
from jobs.queue.scheduling.policy.share import decayed
from jobs.queue.scheduling.snapshot import after, held_slots

COUNTED_EVERY = timedelta(minutes=1)


def apply_rules() -> None:
    """Jobs after one that did not succeed, runs over their time limit, and what projects used."""
    end_what_comes_after_a_failure()
    end_what_ran_too_long()
    count_use()


def end_what_comes_after_a_failure() -> int:
    """Cancel queued jobs that come after one that did not succeed, but for those that start all the same."""
    failed = {job: ahead.failed for job, ahead in after().items() if ahead.failed}
    cancelled = 0
    for job in Job.objects.filter(id__in=list(failed)).only("id", "attempt", "spec") if failed else ():
        if job.spec.get("after_failed") == "start":
            continue
        reason = f"job {failed[job.id][0]}, a dependency, did not succeed"
        with transaction.atomic():
            if lifecycle.change(job.id, job.attempt, Status.CANCELLING, reason, only_from=(Status.QUEUED,)):
                cancelled += lifecycle.change(job.id, job.attempt, Status.CANCELLED, reason)
    return cancelled


def end_what_ran_too_long() -> int:
    """Tell runs to end that are over their time limit, counted from when their ranks were first told of as running."""
    began = StateChange.objects.filter(job=OuterRef("pk"), attempt=OuterRef("attempt"), status=Status.RUNNING)
    limited = Job.objects.filter(status__in=stops.RUNS, time_limit_s__isnull=False)
    rows = limited.annotate(began=Subquery(began.order_by("id").values("at")[:1])).filter(began__isnull=False)
    ended = 0
    for id, attempt, limit_s, since in rows.values_list("id", "attempt", "time_limit_s", "began"):
        if limit_s is not None and timezone.now() - since >= timedelta(seconds=limit_s):
            ended += stops.stop(
                id, attempt, "time limit", f"the time limit of {limit_s} s (run.time_limit_s) is reached"
            )
    return ended


def count_use() -> None:
    """Once a minute: what each project used since the last time, as if it had held all along what it holds now."""
    now = timezone.now()
    due = list(Project.objects.filter(counted__lt=now - COUNTED_EVERY))
    if not due:
        return
    held, half_life_s = held_slots([project.name for project in due]), settings.SHARE_HALF_LIFE_H * 3600
    for project in due:
        seconds = (now - project.counted).total_seconds()
        used = decayed(project.used, held.get(project.name, 0), seconds, half_life_s)
        Project.objects.filter(pk=project.pk, counted=project.counted).update(used=used, counted=now)
