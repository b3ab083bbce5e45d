"""A preempted training job first saves a checkpoint within the time limit of the board.

`run.idle_limit_s`: a run that takes no step ends, and one whose steps are long does not.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from contracts.names import cancel_key, save_key, telemetry_stream
from jobs.models import Host, Job, StateChange, Status
from jobs.queue import actions, termination
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.conftest import attempt_event, host_event, report, send_event
from tests.jobs.metrics.board import fill_board, send_step, send_traffic
from tests.jobs.planning.test_measured_runs import make_exit_event, make_failed_proof, make_summary
from tests.planner.wrong_specs import GOOD

LONG_AGO = timezone.now() - timedelta(days=300)


def preempted(client: redis.Redis, *, ran: bool = True, **changes: Any) -> Job:
    told = {"slots": 4, "device": "cpu", "device_name": "test", "memory_bytes": 2**30, "boot_id": "b"}
    Host.objects.create(name="host-a", **told, last_seen=timezone.now())
    spec = {**GOOD, "train": {**GOOD["train"], "checkpoint_every": 50}, "run": {"preemptible": True}} | changes
    job, _ = actions.submit(User.objects.create_user("owner"), spec)
    schedule()
    send_event(client, host_event(attempts=[report(job.id, 1, "running" if ran else "starting")]))
    read_events(client)
    assert termination.preempt(job.id, "other", "other")
    reconcile(client, LONG_AGO)
    job.refresh_from_db()
    assert job.status == Status.CANCELLING
    return job


def flags(client: redis.Redis, job: Job) -> tuple[bool, bool]:
    """Return whether the stop flag and the cancel flag are set."""
    return bool(client.exists(save_key(job.id, 1))), bool(client.exists(cancel_key(job.id, 1)))


def test_preempted_run_saves_before_it_ends(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    assert flags(live_redis, job) == (True, False)
    assert job.wait_reason.startswith("saving a checkpoint before the end, until ")
    StateChange.objects.filter(status=Status.CANCELLING).update(at=timezone.now() - timedelta(seconds=301))
    reconcile(live_redis, LONG_AGO)
    assert flags(live_redis, job) == (True, True)
    job.refresh_from_db()
    assert job.wait_reason == ""


def test_saved_run_is_requeued_and_resumes(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    ended = attempt_event(job.id, 1, "exited", "cancelled")
    ended["report"]["checkpoint"] = f"{job.id}/1/step-00000007"
    send_event(live_redis, ended)
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    assert job.attempts.get().checkpoint == f"{job.id}/1/step-00000007"


def test_preempted_run_with_a_failed_proof_fails(each_database: str, live_redis: redis.Redis) -> None:
    """The status must be failed, not cancelled."""
    job = preempted(live_redis)
    ended = make_exit_event(job.attempts.get(), make_summary(0.3, proof=make_failed_proof()), "cancelled")
    send_event(live_redis, ended)
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.FAILED, 1)
    assert (
        StateChange.objects.filter(job=job)
        .latest("id")
        .reason.endswith("the job was preempted, and the verification of the run failed")
    )


def test_completed_run_is_not_requeued_after_preemption(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.stop) == (Status.SUCCEEDED, 1, "")


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize("why", ["time limit", "idle"])
def test_completed_run_does_not_fail_by_a_late_limit(live_redis: redis.Redis, why: termination.StopReason) -> None:
    job = preempted(live_redis, retry={"max_attempts": 3})
    Job.objects.update(stop=why)
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.stop) == (Status.SUCCEEDED, 1, "")


@pytest.mark.usefixtures("db")
def test_cancelled_run_is_not_requeued_after_preemption(live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    assert actions.cancel(job, "owner")
    send_event(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.CANCELLED, 1)


@pytest.mark.usefixtures("db")
def test_cancellation_does_not_wait_for_a_checkpoint(live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    assert actions.cancel(job, "owner")
    reconcile(live_redis, LONG_AGO)
    assert flags(live_redis, job) == (True, True)


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    "job",
    [{"train": GOOD["train"]}, {"kind": "script", "script": {"path": "a.py"}, "layout": {"dp": 4}}, {"ran": False}],
    ids=["no checkpoints", "a script", "not trained yet"],
)
def test_run_without_checkpoints_ends_at_once(live_redis: redis.Redis, job: dict[str, Any]) -> None:
    assert flags(live_redis, preempted(live_redis, **job)) == (False, True)


def test_one_step_between_two_checks_is_progress(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(termination.time, "monotonic", lambda: now)
    job = fill_board(owner)
    Job.objects.filter(id=job.id).update(idle_limit_s=12)
    looking = termination.IdleWatch()
    for step in (1, 2, 3):
        send_step(live_redis, job.id, step)
        send_traffic(live_redis, job.id)
        assert looking.stop_idle_runs(live_redis) == 0, f"step {step} was taken {now - 990:.0f} s after the run began"
        now += 10
    live_redis.delete(telemetry_stream(job.id, 1))
    assert looking.stop_idle_runs(live_redis) == 0
    now += 10
    assert looking.stop_idle_runs(live_redis) == 1
    assert "after step 3" in StateChange.objects.filter(job=job).latest("id").reason
