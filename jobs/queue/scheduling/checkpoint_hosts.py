"""Select the hosts that can send a checkpoint to a retry."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from contracts.control import VERSION, ResumeCheckpoint
from contracts.names import TASK_LEND, host_queue
from jobs.models import Attempt, Host, Job, Loan, Outbox, Status


def kept_checkpoint(job: Job) -> ResumeCheckpoint | None:
    """The newest checkpoint that an earlier attempt told of: rank 0 writes it, on the first host."""
    told = Attempt.objects.filter(job=job, number__lt=job.attempt).exclude(checkpoint="").order_by("-number")
    found = told.filter(members__node=0).values_list("checkpoint", "members__host_name").first()
    return ResumeCheckpoint(name=found[0], host=found[1]) if found else None


def holders() -> dict[str, str]:
    """By queued job that an earlier attempt saved a checkpoint of: the host that has the newest."""
    saved = Attempt.objects.exclude(checkpoint="").filter(job__status=Status.QUEUED, members__node=0)
    return dict(saved.order_by("number").values_list("job_id", "members__host_name"))


def lend(placed: Iterable[tuple[Attempt, Collection[str]]]) -> list[Outbox]:
    """Have retries on these hosts sent what none of them has; the orders for those who do.

    A host that is silent, or was removed, is not asked: the attempt then fails and names it.
    """
    wanted = {}
    for attempt, hosts in placed:
        kept = kept_checkpoint(attempt.job) if attempt.number > 1 else None
        if kept is not None and kept["host"] not in hosts:
            wanted[attempt] = kept["host"]
    if not wanted:
        return []
    lenders = {host.name: host for host in Host.objects.reachable().filter(name__in=wanted.values())}
    loans = [Loan(attempt=one, host=lenders[name]) for one, name in wanted.items() if name in lenders]
    return [order(loan) for loan in Loan.objects.bulk_create(loans)]


def order(loan: Loan) -> Outbox:
    """For the host that lends; its secret and when it expires are set as it is sent."""
    job = loan.attempt.job
    told: dict[str, Any] = {"v": VERSION, "job": job.id, "attempt": loan.attempt.number, "owner": job.owner_id}
    return Outbox(task=TASK_LEND, queue=host_queue(loan.host.name), arguments=[told])
