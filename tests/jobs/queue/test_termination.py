"""A training job that gives way saves a checkpoint first, for as long as the board's patience lasts.

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
from tests.jobs.conftest import attempt_event, host_event, report, say
from tests.jobs.metrics.board import board, go_on, tell
from tests.jobs.planning.test_measured_runs import make_exit_event, make_failed_proof, make_summary
from tests.planner.wrong_specs import GOOD

LONG_AGO = timezone.now() - timedelta(days=300)


def preempted(client: redis.Redis, *, ran: bool = True, **changes: Any) -> Job:
    told = {"slots": 4, "device": "cpu", "device_name": "test", "memory_bytes": 2**30, "boot_id": "b"}
    Host.objects.create(name="host-a", **told, last_seen=timezone.now())
    spec = {**GOOD, "train": {**GOOD["train"], "checkpoint_every": 50}, "run": {"preemptible": True}} | changes
    job, _ = actions.submit(User.objects.create_user("owner"), spec)
    schedule()
    say(client, host_event(attempts=[report(job.id, 1, "running" if ran else "starting")]))
    read_events(client)
    assert termination.preempt(job.id, "other", "other")
    reconcile(client, LONG_AGO)
    job.refresh_from_db()
    assert job.status == Status.CANCELLING
    return job


def flags(client: redis.Redis, job: Job) -> tuple[bool, bool]:
    """To save and stop; to end."""
    return bool(client.exists(save_key(job.id, 1))), bool(client.exists(cancel_key(job.id, 1)))


def test_it_is_asked_to_save_and_only_later_told_to_end(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    assert flags(live_redis, job) == (True, False)
    assert job.wait_reason.startswith("saving a checkpoint before the end, until ")
    StateChange.objects.filter(status=Status.CANCELLING).update(at=timezone.now() - timedelta(seconds=301))
    reconcile(live_redis, LONG_AGO)
    assert flags(live_redis, job) == (True, True)
    job.refresh_from_db()
    assert job.wait_reason == ""


def test_where_it_saved_it_is_queued_again_and_goes_on_from_there(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    ended = attempt_event(job.id, 1, "exited", "cancelled")
    ended["report"]["checkpoint"] = f"{job.id}/1/step-00000007"
    say(live_redis, ended)
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    assert job.attempts.get().checkpoint == f"{job.id}/1/step-00000007"


def test_what_was_disproved_as_it_gave_way_has_failed(each_database: str, live_redis: redis.Redis) -> None:
    """It was called cancelled, as if somebody had asked for that end."""
    job = preempted(live_redis)
    ended = make_exit_event(job.attempts.get(), make_summary(0.3, proof=make_failed_proof()), "cancelled")
    say(live_redis, ended)
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.FAILED, 1)
    assert (
        StateChange.objects.filter(job=job)
        .latest("id")
        .reason.endswith("the job was preempted, and the verification of the run failed")
    )


def test_what_had_done_all_before_it_gave_way_is_not_run_again(each_database: str, live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    say(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.stop) == (Status.SUCCEEDED, 1, "")


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize("why", ["time limit", "idle"])
def test_nor_has_it_failed_by_a_limit_that_came_too_late(live_redis: redis.Redis, why: termination.StopReason) -> None:
    job = preempted(live_redis, retry={"max_attempts": 3})
    Job.objects.update(stop=why)
    say(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.stop) == (Status.SUCCEEDED, 1, "")


@pytest.mark.usefixtures("db")
def test_nor_is_it_where_it_was_cancelled_meanwhile(live_redis: redis.Redis) -> None:
    job = preempted(live_redis)
    assert actions.cancel(job, "owner")
    say(live_redis, attempt_event(job.id, 1, "exited", "succeeded"))
    read_events(live_redis)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.CANCELLED, 1)


@pytest.mark.usefixtures("db")
def test_whoever_cancels_it_meanwhile_waits_for_no_checkpoint(live_redis: redis.Redis) -> None:
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
def test_who_has_nothing_to_save_is_told_to_end_at_once(live_redis: redis.Redis, job: dict[str, Any]) -> None:
    assert flags(live_redis, preempted(live_redis, **job)) == (False, True)


def test_a_step_that_is_told_between_two_looks_is_one(
    owner: User, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(termination.time, "monotonic", lambda: now)
    job = board(owner)
    Job.objects.filter(id=job.id).update(idle_limit_s=12)
    looking = termination.IdleWatch()
    for step in (1, 2, 3):
        tell(live_redis, job.id, step)
        go_on(live_redis, job.id)
        assert looking.stop_idle_runs(live_redis) == 0, f"step {step} was taken {now - 990:.0f} s after the run began"
        now += 10
    live_redis.delete(telemetry_stream(job.id, 1))
    assert looking.stop_idle_runs(live_redis) == 0
    now += 10
    assert looking.stop_idle_runs(live_redis) == 1
    assert "after step 3" in StateChange.objects.filter(job=job).latest("id").reason
