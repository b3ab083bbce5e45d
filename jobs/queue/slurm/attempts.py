"""Create, update, and end the attempts that Slurm runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from contracts.control import ALLOCATION_ORDER_VERSION, AllocationOrder, ExitReport, Outcome, UploadOrder
from jobs.core.credentials import derive_upload_secret, issue_run_token
from jobs.models import MAX_REASON_CHARACTERS, Attempt, Job, Member, RunToken, Status
from jobs.queue import attempt_completion, lifecycle, termination
from jobs.queue.orders import find_newest_checkpoint, spec_for_hosts
from jobs.queue.slurm.script import Site, Submission, build_submission
from jobs.queue.slurm.states import ENDED_BY_SLURM, PREEMPTED, SlurmJob, describe_end
from planner.facts.kinds import get_num_slots, get_slurm_spec
from planner.facts.spec import JobSpec

STARTED_IN_SLURM = "Slurm had already started the job"


def create_attempt(job: Job) -> None:
    """Create the attempt of a locked queued job, with a member per node."""
    spec, now = JobSpec.model_validate(job.spec), timezone.now()
    nodes = get_slurm_spec(spec).nodes
    num_ranks = spec.layout.world_size // nodes
    attempt = Attempt.objects.create(job=job, number=job.attempt)
    Member.objects.bulk_create(
        Member(
            attempt=attempt,
            node=node,
            host_name=f"node {node}",  # until its supervisor joins with the name of the node
            first_rank=node * num_ranks,
            num_ranks=num_ranks,
            ordered=now,
        )
        for node in range(nodes)
    )


def prepare_submission(attempt: Attempt, site: Site, certificates: str) -> Submission:
    """Build a submission with a new token. Earlier tokens stay valid until Slurm accepts this submission."""
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
    if attempt.number > 1 and (checkpoint := find_newest_checkpoint(attempt.job)):
        order["checkpoint"] = checkpoint
    if attempt.job.trace_id:
        order["trace"] = attempt.job.trace_id
    if (upload := attempt.job.upload) is not None:
        secret = derive_upload_secret(attempt.job_id, attempt.number)
        order["upload"] = UploadOrder(sha256=upload.sha256, size=upload.size, secret=secret)
    return build_submission(spec, attempt.job_id, attempt.number, order, site, settings.SAVE_S)


def record_job_id(attempt: Attempt, job: str) -> None:
    """Store the ID of the Slurm job, once."""
    if not attempt.engine_id:
        Attempt.objects.filter(pk=attempt.pk, engine_id="").update(engine_id=job)
        attempt.engine_id = job


def record_submission(attempt: Attempt, job: str) -> None:
    """Store an accepted submission, and revoke the tokens of earlier submissions."""
    record_job_id(attempt, job)
    RunToken.objects.filter(pk__in=_list_tokens(attempt)[1:]).delete()


def discard_latest_token(attempt: Attempt) -> None:
    """Revoke the token of a submission that Slurm did not accept."""
    RunToken.objects.filter(pk__in=_list_tokens(attempt)[:1]).delete()


def record_slurm_state(attempt: Attempt, fields: dict[str, str]) -> None:
    """Store the fields that the page of the job shows."""
    if attempt.engine_told != fields:
        Attempt.objects.filter(pk=attempt.pk).update(engine_told=fields)


def list_joined_attempts(attempts: Iterable[Attempt]) -> set[int]:
    """Return the primary keys of attempts with a joined supervisor."""
    joined = Member.objects.filter(attempt__in=[attempt.pk for attempt in attempts]).exclude(claim="")
    return set(joined.order_by().values_list("attempt", flat=True))


def _list_tokens(attempt: Attempt) -> list[int]:
    """List primary keys, the latest first."""
    return list(RunToken.objects.filter(attempt=attempt).order_by("-pk").values_list("pk", flat=True))


def finish(attempt: Attempt, job: SlurmJob, printed: str) -> None:
    """End the members without an own exit report after the Slurm job ended. `printed`: end of the script's output."""
    outcome, reason = describe_end(job)
    if printed and job.state not in ENDED_BY_SLURM:
        reason = f"{reason}: {' '.join(printed.split())[-600:]}"
    if attempt.job.status == Status.CANCELLING:
        outcome, reason = "cancelled", f"Slurm ended job {job.id}"
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, STARTED_IN_SLURM)})
        if job.state == PREEMPTED and attempt.ended is None:
            termination.stop(attempt.job_id, attempt.number, "preempted", f"Slurm preempted job {job.id}")
        _end_members(attempt, outcome, reason)


def reject(attempt: Attempt, why: str) -> None:
    """Fail an attempt that Slurm will never accept."""
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, "submitted to Slurm")})
        _end_members(attempt, "failed", f"Slurm rejected the job: {why}")


def lose(attempt: Attempt, reason: str) -> None:
    """Mark an attempt as lost that Slurm does not have."""
    with transaction.atomic():
        lifecycle.start_jobs({attempt.job_id: (attempt.number, STARTED_IN_SLURM)})
        for member in _list_unended(attempt):
            attempt_completion.lose_member(member, reason)
        _record_engine_end(attempt)


def _end_members(attempt: Attempt, outcome: Outcome, reason: str) -> None:
    for member in _list_unended(attempt):
        sent = cast(ExitReport | None, member.exit) or attempt_completion.build_exit_report(attempt, outcome, reason)
        attempt_completion.end_member(member, {**sent, "outcome": outcome, "reason": reason[:MAX_REASON_CHARACTERS]})
    _record_engine_end(attempt)


def _list_unended(attempt: Attempt) -> list[Member]:
    return list(attempt.members.filter(ended__isnull=True).select_related("attempt__job", "host"))


def _record_engine_end(attempt: Attempt) -> None:
    Attempt.objects.filter(pk=attempt.pk, engine_ended__isnull=True).update(engine_ended=timezone.now())
