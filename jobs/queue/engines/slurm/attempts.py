"""Rows of attempts that Slurm runs: made, noted, told of."""

from __future__ import annotations

from collections.abc import Iterable

from django.conf import settings
from django.utils import timezone

from contracts.control import ALLOCATION_ORDER_VERSION, AllocationOrder
from jobs.core.run_tokens import issue
from jobs.models import Attempt, Job, Member, RunToken
from jobs.queue.engines.slurm.script import Submission, submission
from jobs.queue.engines.slurm.site import Site
from jobs.queue.scheduling.checkpoints import kept_checkpoint
from jobs.queue.sent import spec_for_hosts
from planner.facts.kinds import get_num_slots, get_slurm_spec
from planner.facts.spec import JobSpec


def begin(job: Job) -> None:
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


def submit(attempt: Attempt, site: Site, certificates: str) -> Submission:
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
        token=issue(attempt),
        folder=site.folder,
        lease_s=settings.LEASE_S,
    )
    if attempt.number > 1 and (kept := kept_checkpoint(attempt.job)):
        order["checkpoint"] = kept
    return submission(spec, attempt.job_id, attempt.number, order, site, settings.SAVE_S)


def note(attempt: Attempt, job: str) -> None:
    """Which of Slurm's jobs it is; once."""
    if not attempt.engine_id:
        Attempt.objects.filter(pk=attempt.pk, engine_id="").update(engine_id=job)
        attempt.engine_id = job


def taken(attempt: Attempt, job: str) -> None:
    """Slurm took what was sent last: what was sent before and comes late is refused by its token."""
    note(attempt, job)
    RunToken.objects.filter(pk__in=_tokens(attempt)[1:]).delete()


def not_taken(attempt: Attempt) -> None:
    """Nobody has the token of what was sent last."""
    RunToken.objects.filter(pk__in=_tokens(attempt)[:1]).delete()


def tell(attempt: Attempt, told: dict[str, str]) -> None:
    """What a page shows of it, where that is news."""
    if attempt.engine_told != told:
        Attempt.objects.filter(pk=attempt.pk).update(engine_told=told)


def joined(attempts: Iterable[Attempt]) -> set[int]:
    """Keys of those of which a supervisor spoke."""
    spoke = Member.objects.filter(attempt__in=[attempt.pk for attempt in attempts]).exclude(claim="")
    return set(spoke.order_by().values_list("attempt", flat=True))


def _tokens(attempt: Attempt) -> list[int]:
    """Keys, the last first."""
    return list(RunToken.objects.filter(attempt=attempt).order_by("-pk").values_list("pk", flat=True))
