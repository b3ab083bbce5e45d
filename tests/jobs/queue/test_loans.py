"""Transfer of a checkpoint from its host to the hosts of a retry."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.codec import validate_lend_order
from contracts.control import LaunchOrder, LendOrder
from contracts.names import TASK_LAUNCH, TASK_LEND, host_queue, loan_key
from jobs.models import Attempt, Host, Job, Loan, Member, Outbox, Status
from jobs.queue import actions
from jobs.queue.hosts.redis_access import build_users, get_redis_user
from jobs.queue.orders import ORDER_BUILDERS, resend_launch_order
from jobs.queue.scheduling.scheduler import schedule
from tests.planner.wrong_specs import GOOD


@pytest.fixture
def retried(owner: User, make_host: Callable[..., Host]) -> Job:
    """Return a requeued job with a checkpoint on host-a, which is drained."""
    a, _ = make_host("host-a"), make_host("host-b")
    job, _ = actions.submit(owner, GOOD)
    ended = timezone.now()
    first = Attempt.objects.create(job=job, number=1, checkpoint=f"{job.id}/1/step-00000020", ended=ended)
    Member.objects.create(
        attempt=first, node=0, host=a, host_name="host-a", first_rank=0, num_ranks=1, ordered=ended, ended=ended
    )
    Job.objects.filter(pk=job.pk).update(attempt=2, status=Status.QUEUED)
    Host.objects.filter(name="host-a").update(drained=True)
    Outbox.objects.all().delete()
    job.refresh_from_db()
    return job


def orders() -> dict[str, Any]:
    """Return the sent orders by queue."""
    return {row.queue: ORDER_BUILDERS[row.task](row.arguments[0], 1.0) for row in Outbox.objects.all()}


def test_lender_and_borrower_get_the_same_secret(retried: Job) -> None:
    schedule()
    assert {row.task for row in Outbox.objects.all()} == {TASK_LAUNCH, TASK_LEND}
    assert "secret" not in str([row.arguments for row in Outbox.objects.all()]), "the database holds none"
    told = orders()
    lend: LendOrder = validate_lend_order(told[host_queue("host-a")])
    launch: LaunchOrder = told[host_queue("host-b")]
    assert (lend["job"], lend["attempt"], lend["owner"]) == (retried.id, 2, retried.owner_id)
    assert launch["checkpoint"] == {
        "name": f"{retried.id}/1/step-00000020", "host": "host-a", "lent": lend["secret"],
    }  # fmt: skip
    Outbox.objects.all().delete()
    resend_launch_order(Job.objects.get(pk=retried.pk), Member.objects.get(attempt__number=2))
    assert orders() == told, "an order that was lost is sent again with its loan"


def test_only_the_first_host_of_the_attempt_sees_the_lender(retried: Job) -> None:
    schedule()
    key = loan_key("host-a", retried.id, 2)
    Host.objects.update(generation=1)
    rules = build_users(Host.objects.all())
    assert f"(+hgetall %R~{key})" in rules[get_redis_user("host-b")]
    Member.objects.filter(attempt__number=2).update(node=1)
    assert key not in str(build_users(Host.objects.all())[get_redis_user("host-b")])


def test_ended_attempt_sends_no_loan_order(retried: Job) -> None:
    schedule()
    Attempt.objects.filter(number=2).update(ended=timezone.now())
    assert orders()[host_queue("host-a")] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"last_seen": timezone.now() - timedelta(minutes=5)},
        {"removed": timezone.now()},
        {"drained": False},  # the job goes there itself
    ],
    ids=["silent", "removed", "of the gang"],
)
def test_no_loan_without_a_usable_lender(retried: Job, changes: dict[str, Any]) -> None:
    Host.objects.filter(name="host-a").update(**changes)
    schedule()
    (row,) = Outbox.objects.all()
    assert row.task == TASK_LAUNCH
    assert not Loan.objects.exists()
    assert "lent" not in ORDER_BUILDERS[TASK_LAUNCH](row.arguments[0], 1.0)["checkpoint"]
