"""Rows of attempts that Slurm runs: made, noted, told of.

How an attempt that Slurm ran ends: by its supervisors' word, and by Slurm's where they cannot know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from contracts.control import ALLOCATION_ORDER_VERSION, VERSION, AllocationOrder, ExitReport
from jobs.core.credentials import issue_run_token
from jobs.models import Attempt, Job, Member, RunToken, Status
from jobs.queue import attempt_completion as endings
from jobs.queue import lifecycle, termination
from jobs.queue.orders import find_newest_checkpoint, spec_for_hosts
from jobs.queue.slurm.script import Site, Submission, build_submission
from jobs.queue.slurm.states import ENDED_BY_SLURM, PREEMPTED, SlurmJob, describe_end
from planner.facts.kinds import get_num_slots, get_slurm_spec
from planner.facts.spec import JobSpec


def create_attempt(job: Job) -> None:
    """The attempt of a queued job that is locked, with a member for each node that it asks for."""
    spec, now = JobSpec.model_validate(job.spec), timezone.now()
    nodes, ranks = get_slurm_spec(spec).nodes, spec.layout.world_size
    attempt = Attempt.objects.create(job=job, number=job.attempt)
    Member.objects.bulk_create(
        Member(
            attempt=attempt,
            node=node,
            host_name=f"node {node}",  # until it joins under its own
            first_rank=node * (ranks // nodes),
            num_ranks=ranks // nodes,
            ordered=now,
        )
        for node in range(nodes)
    )


def prepare_submission(attempt: Attempt, site: Site, certificates: str) -> Submission:
    """What sbatch is to be given, with a token of its own. Earlier ones are good until Slurm has taken this one: what
    was sent before may be there."""
    spec = JobSpec.model_validate(attempt.job.spec)
    nodes = get_slurm_spec(spec).nodes
    order = AllocationOrder(
        v=ALLOCATION_ORDER_VERSION,
        job=attempt.job_id,
        attempt=attempt.number,
        spec=spec_for_hosts(attempt.job.spec),
        nodes=nodes,
        slots=get_num_slots(spec) // nodes,
        board=site.board,
        certificates=certificates,
        token=issue_run_token(attempt),
        folder=site.folder,
        lease_s=settings.LEASE_S,
    )
    if attempt.number > 1 and (kept := find_newest_checkpoint(attempt.job)):
        order["checkpoint"] = kept
    return build_submission(spec, attempt.job_id, attempt.number, order, site, settings.SAVE_S)


def record_job_id(attempt: Attempt, job: str) -> None:
    """Which of Slurm's jobs it is; once."""
    if not attempt.engine_id:
        Attempt.objects.filter(pk=attempt.pk, engine_id="").update(engine_id=job)
        attempt.engine_id = job


def record_submission(attempt: Attempt, job: str) -> None:
    """Slurm took what was sent last: what was sent before and comes late is refused by its token."""
    record_job_id(attempt, job)
    RunToken.objects.filter(pk__in=_tokens(attempt)[1:]).delete()


def discard_latest_token(attempt: Attempt) -> None:
    """Nobody has the token of what was sent last."""
    RunToken.objects.filter(pk__in=_tokens(attempt)[:1]).delete()


def record_slurm_state(attempt: Attempt, told: dict[str, str]) -> None:
    """What a page shows of it, where that is news."""
    if attempt.engine_told != told:
        Attempt.objects.filter(pk=attempt.pk).update(engine_told=told)


def list_joined_attempts(attempts: Iterable[Attempt]) -> set[int]:
    """Keys of those of which a supervisor spoke."""
    spoke = Member.objects.filter(attempt__in=[attempt.pk for attempt in attempts]).exclude(claim="")
    return set(spoke.order_by().values_list("attempt", flat=True))


def _tokens(attempt: Attempt) -> list[int]:
    """Keys, the last first."""
    return list(RunToken.objects.filter(attempt=attempt).order_by("-pk").values_list("pk", flat=True))


def finish(attempt: Attempt, job: SlurmJob, printed: str) -> None:
    """Slurm says that nothing of it runs: whoever of it has told no end of its own ends by that."""
    outcome, reason = describe_end(job)
    if printed and job.state not in ENDED_BY_SLURM:
        reason = f"{reason}: {' '.join(printed.split())[-600:]}"
    if attempt.job.status == Status.CANCELLING:
        outcome, reason = "cancelled", f"Slurm ended job {job.id}"
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, "Slurm had already started the job")})
        if job.state == PREEMPTED and attempt.ended is None:
            termination.stop(attempt.job_id, attempt.number, "preempted", f"Slurm preempted job {job.id}")
        for member in _unended(attempt):
            told = cast(ExitReport | None, member.exit) or _report(attempt)
            endings.end_member(member, {**told, "outcome": outcome, "reason": reason[:1000]})
        _over(attempt)


def reject(attempt: Attempt, why: str) -> None:
    """Slurm does not take it and never will."""
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, "submitted to Slurm")})
        for member in _unended(attempt):
            endings.end_member(
                member, {**_report(attempt), "outcome": "failed", "reason": f"Slurm rejected the job: {why}"[:1000]}
            )
        _over(attempt)


def lose(attempt: Attempt, reason: str) -> None:
    """Nothing of it is with Slurm."""
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, "Slurm had already started the job")})
        for member in _unended(attempt):
            endings.lose_member(member, reason)
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
