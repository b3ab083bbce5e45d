"""How an attempt that Slurm ran ends: by its supervisors' word, and by Slurm's where they cannot know."""

from __future__ import annotations

import time
from typing import cast

from django.db import transaction
from django.utils import timezone

from contracts.control import VERSION, ExitReport
from jobs.models import Attempt, Member, Status
from jobs.queue import ending as endings
from jobs.queue import lifecycle
from jobs.queue.control import stops
from jobs.queue.engines.slurm.rows import SlurmJob
from jobs.queue.engines.slurm.words import ENDED_BY_SLURM, PREEMPTED, ending


def finish(attempt: Attempt, job: SlurmJob, printed: str) -> None:
    """Slurm says that nothing of it runs: whoever of it has told no end of its own ends by that."""
    outcome, reason = ending(job)
    if printed and job.state not in ENDED_BY_SLURM:
        reason = f"{reason}: {' '.join(printed.split())[-600:]}"
    if attempt.job.status == Status.CANCELLING:
        outcome, reason = "cancelled", f"Slurm ended job {job.id}"
    with transaction.atomic():
        lifecycle.start({attempt.job_id: (attempt.number, "Slurm had already started the job")})
        if job.state == PREEMPTED and attempt.ended is None:
            stops.stop(attempt.job_id, attempt.number, "preempted", f"Slurm preempted job {job.id}")
        for member in _unended(attempt):
            told = cast(ExitReport | None, member.exit) or _report(attempt)
            endings.end(member, {**told, "outcome": outcome, "reason": reason[:1000]})
        _over(attempt)


def refuse(attempt: Attempt, why: str) -> None:
    """Slurm does not take it and never will."""
    with transaction.atomic():
        lifecycle.start({attempt.job_id: (attempt.number, "submitted to Slurm")})
        for member in _unended(attempt):
            endings.end(
                member, {**_report(attempt), "outcome": "failed", "reason": f"Slurm rejected the job: {why}"[:1000]}
            )
        _over(attempt)


def lose(attempt: Attempt, reason: str) -> None:
    """Nothing of it is with Slurm."""
    with transaction.atomic():
        lifecycle.start({attempt.job_id: (attempt.number, "Slurm had already started the job")})
        for member in _unended(attempt):
            endings.lose(member, reason)
        _over(attempt)


def _unended(attempt: Attempt) -> list[Member]:
    return list(attempt.members.filter(ended__isnull=True).select_related("attempt__job", "host"))


def _over(attempt: Attempt) -> None:
    Attempt.objects.filter(pk=attempt.pk, engine_ended__isnull=True).update(engine_ended=timezone.now())


def _report(attempt: Attempt) -> ExitReport:
    """Of a member that told nothing."""
    return ExitReport(
        v=VERSION,
        job=attempt.job_id,
        attempt=attempt.number,
        outcome="lost",
        reason="",
        exit_code=None,
        rank=None,
        signal=None,
        log_tail=[],
        started=attempt.created.timestamp(),
        finished=time.time(),
        summary=None,
    )
