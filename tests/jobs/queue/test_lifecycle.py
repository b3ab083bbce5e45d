"""Concurrent changes leave legal histories, and reports of a gang are merged."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.control import ExitReport
from contracts.names import TASK_ACKNOWLEDGE, TASK_LAUNCH, cancel_key, host_queue
from jobs.models import TERMINAL, Attempt, Host, Job, Member, Outbox, SlotAllocation, StateChange, Status
from jobs.queue import actions, attempt_completion, lifecycle
from jobs.queue.attempt_completion import merge_reports
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.lifecycle import TRANSITIONS
from jobs.queue.scheduling.scheduler import schedule
from jobs.runs.baselines import compute_facts
from tests.jobs.conftest import attempt_event, run_together, send_event
from tests.jobs.planning.test_measured_runs import make_exit_event, make_failed_proof, make_summary, start_run
from tests.planner.wrong_specs import GOOD

LONG_AGO = timezone.now() - timedelta(days=1)


def submitted(owner: User, **changes: Any) -> Job:
    job, _ = actions.submit(owner, {**GOOD, **changes})
    return job


def status(job: Job) -> str:
    job.refresh_from_db()
    return job.status


@pytest.mark.parametrize("terminal", TERMINAL)
def test_terminal_status_never_changes(owner: User, terminal: Status) -> None:
    job = submitted(owner)
    Job.objects.filter(id=job.id).update(status=terminal)
    assert not any(lifecycle.change_status(job.id, 1, to, "tried") for to in Status)
    assert status(job) == terminal


def test_rejects_status_changes_that_are_not_listed(owner: User) -> None:
    for before in Status:
        for after in Status:
            job = submitted(owner)
            Job.objects.filter(id=job.id).update(status=before)
            assert lifecycle.change_status(job.id, 1, after, "tried") == (after in TRANSITIONS[before]), (before, after)


def test_ignores_messages_of_an_earlier_attempt(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    make_host()
    job = submitted(owner)
    schedule()
    send_event(live_redis, attempt_event(job.id, 1, "exited", "failed"))
    read_events(live_redis)
    assert status(job) == Status.FAILED
    assert actions.requeue(job, "tester")
    schedule()
    assert (status(job), job.attempt) == (Status.STARTING, 2)
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    send_event(live_redis, attempt_event(job.id, 1, "running"))
    read_events(live_redis)
    assert status(job) == Status.STARTING
    assert Attempt.objects.get(job=job, number=1).exit["outcome"] == "failed"


def test_retry_starts_without_the_stop_reason_and_outside_the_archive(owner: User) -> None:
    job = submitted(owner)
    Job.objects.filter(id=job.id).update(status=Status.CANCELLED, stop="limit", archived=True)
    assert actions.requeue(job, "tester")
    assert status(job) == Status.QUEUED
    assert (job.attempt, job.stop, job.archived) == (2, "", False)


def test_records_the_history_and_frees_slots(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    make_host()
    job = submitted(owner)
    schedule()
    assert SlotAllocation.objects.count() == 4
    assert Outbox.objects.get(task=TASK_LAUNCH).queue == host_queue("host-a")
    send_event(live_redis, attempt_event(job.id, 1, "running"))
    send_event(live_redis, {"kind": "nonsense", "v": 1})
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    history = list(StateChange.objects.filter(job=job).values_list("status", flat=True))
    assert history == ["queued", "starting", "running", "succeeded"]
    assert SlotAllocation.objects.count() == 0
    assert Outbox.objects.filter(task=TASK_ACKNOWLEDGE, arguments=[job.id, 1]).count() == 1
    assert read_events(live_redis) == 0


def test_queue_order_and_wait_reasons(owner: User, make_host: Callable[..., Host]) -> None:
    first = submitted(owner, name="first")
    schedule()
    first.refresh_from_db()
    assert first.wait_reason == "No CPU host is connected."
    make_host()
    later, urgent = submitted(owner, name="later"), submitted(owner, name="urgent")
    Job.objects.filter(id=urgent.id).update(priority=5)
    assert schedule() == 1
    assert [status(job) for job in (first, later, urgent)] == ["queued", "queued", "starting"]
    assert first.wait_reason == "The job needs 4 CPU slots on one host. Host host-a has 0 of 4 slots free."
    told = 'Each matching host is kept for a job ahead. Job "first" is ahead and needs 4 slots.'
    assert later.wait_reason == f"The job needs 4 CPU slots on one host. {told}"


def test_unplaceable_job_does_not_block_others(owner: User, make_host: Callable[..., Host]) -> None:
    large = submitted(owner, name="large", layout={"dp": 4, "tp": 2})
    make_host()
    small = submitted(owner, name="small")
    schedule()
    assert [status(large), status(small)] == ["queued", "starting"]
    assert large.wait_reason == "The job needs 8 CPU slots on one host. The largest host has 4 slots."


def test_drained_host_gets_no_jobs(owner: User, make_host: Callable[..., Host]) -> None:
    make_host()
    Host.objects.update(drained=True)
    job = submitted(owner)
    schedule()
    job.refresh_from_db()
    assert job.wait_reason == "Every CPU host is drained."


def test_sets_the_cancel_flag_again_after_redis_was_emptied(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    make_host()
    job = submitted(owner)
    schedule()
    assert actions.cancel(job, "tester")
    reconcile(live_redis, LONG_AGO)
    live_redis.flushall()
    reconcile(live_redis, LONG_AGO)
    assert live_redis.exists(cancel_key(job.id, 1))
    send_event(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
    read_events(live_redis)
    assert status(job) == Status.CANCELLED
    assert not actions.cancel(job, "tester")


def test_queued_job_survives_an_emptied_redis(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    job = submitted(owner)
    live_redis.flushall()
    make_host()
    assert schedule() == 1
    assert status(job) == Status.STARTING


@pytest.mark.django_db(transaction=True)
def test_concurrent_cancel_and_exit_give_one_terminal_state(
    make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    owner = User.objects.create_user("racer")
    make_host(slots=4)
    for _ in range(25):
        job = submitted(owner)
        schedule()
        send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
        both = [lambda job=job: actions.cancel(job, "racer"), lambda: read_events(live_redis)]
        run_together(both)
        send_event(live_redis, attempt_event(job.id, 1, "exited", "cancelled"))
        read_events(live_redis)
        assert status(job) in TERMINAL
        ends = StateChange.objects.filter(job=job, status__in=TERMINAL)
        assert ends.count() == 1
        assert SlotAllocation.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_concurrent_schedulers_start_a_job_once(make_host: Callable[..., Host]) -> None:
    owner = User.objects.create_user("racer")
    make_host(slots=4)
    for _ in range(10):
        job = submitted(owner)
        run_together([schedule, schedule])
        assert Attempt.objects.filter(job=job).count() == 1
        assert Outbox.objects.filter(task=TASK_LAUNCH).count() == 1
        Outbox.objects.all().delete()
        attempt_completion.lose_member(Member.objects.get(attempt__job=job), "make room")


def test_run_with_a_failed_proof_is_not_resumed(
    owner: User, make_host: Callable[..., Host], live_redis: redis.Redis, api: Callable[..., APIClient], client: Client
) -> None:
    """The next attempt must not resume a checkpoint of a run whose replicas differed."""
    make_host()
    attempt = start_run(owner, retry={"max_attempts": 3})
    job = attempt.job
    send_event(live_redis, make_exit_event(attempt, make_summary(0.3, proof=make_failed_proof()), "failed"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.FAILED, 1)
    job.status, job.stop = Status.CANCELLED, "preempted"
    assert job.get_retry_reason() is None, "a preemption does not change this"
    for way in ("requeue", "smaller"):
        answer = api(owner).post(f"/api/v1/jobs/{job.id}/{way}", format="json")
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (409, "proof")
    client.force_login(owner)
    (form,) = re.findall(r'<form id="requeue-form"[^>]*>', client.get(f"/jobs/{job.id}/").content.decode())
    assert form.endswith("hidden>")
    for way in ("requeue", "smaller"):
        page = client.post(f"/jobs/{job.id}/{way}/", follow=True).content.decode()
        assert "The verification of this run failed" in page
    client.force_login(User.objects.create_superuser("root"))
    client.post("/admin/jobs/job/", {"action": "requeue", "_selected_action": [job.id]})
    job.refresh_from_db()
    assert job.status == Status.FAILED
    assert api(owner).post(f"/api/v1/jobs/{job.id}/copy", {}, format="json").status_code == 201


def test_changes_wait_once_for_an_unreachable_channel_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    class Layer:
        async def group_send(self, group: str, message: dict[str, Any]) -> None:
            sent.append(group)
            raise redis.ConnectionError("away")

    now = 100.0
    monkeypatch.setattr(lifecycle, "get_channel_layer", Layer)
    monkeypatch.setattr(lifecycle, "_announce_after", 0.0)
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: now)
    for number in range(1000):
        lifecycle.announce(f"job-{number}")
    assert sent == ["job.job-0"]
    now += lifecycle.ANNOUNCE_PAUSE_S
    lifecycle.announce("job-1000")
    assert sent == ["job.job-0", "job.job-1000"]


def report(**make_summary: Any) -> ExitReport:
    """Build the report of a member."""
    told: Any = {"outcome": "succeeded", "started": 1.0, "finished": 2.0}
    whole = {
        "steps": 1,
        "tokens_per_s": None,
        "losses": [],
        "eval_losses": [],
        "cells": {},
        "verdict": {},
        **make_summary,
    }
    return {**told, "summary": whole if make_summary else None}


def cells(rank: int) -> dict[str, Any]:
    return {str(rank): [{"phase": "step", "axis": "dp", "op": "all_reduce", "payload_bytes": 8, "count": 1}]}


def test_summary_of_a_gang_omits_missing_ranks() -> None:
    members = [
        report(cells=cells(0), cells_left_out=3),
        report(cells=cells(4)),
        report(cells=cells(8), cells_left_out=2),
    ]
    whole = merge_reports(members)
    assert whole is not None
    assert whole["summary"] is not None
    assert whole["summary"]["cells_left_out"] == 5
    told = compute_facts(whole, 12)
    assert (told["sent"], told["no_sent"]) == ([], "only 7 of 12 ranks have stored traffic")


def test_summary_of_a_gang_omits_members_without_a_summary() -> None:
    whole = merge_reports([report(cells=cells(0)), report()], silent_ranks=4)
    assert compute_facts(whole, 8)["no_sent"] == "only 4 of 8 ranks have stored traffic"
    all_told = merge_reports([report(cells=cells(0)), report(cells=cells(4))])
    assert compute_facts(all_told, 8)["sent"] == [{"axis": "dp", "op": "all_reduce", "bytes": 16.0, "calls": 2.0}]
