"""Engine with a real Slurm and a real database: interruptions never start an attempt twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Attempt, Job, RunToken, Status
from jobs.queue import actions, staff_actions
from jobs.queue.slurm.commands import CommandRunner, Slurm
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import Site
from jobs.queue.slurm.states import SlurmJob, format_job_name
from tests.slurm.cluster import Cluster
from tests.slurm.login import Login
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SLURM = Slurm(CommandRunner())
SPEC = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "resources": {"engine": "slurm"}}


@pytest.fixture
def job(site: Site, db: None) -> Job:
    owner = User.objects.create_user("owner")
    return actions.submit(owner, SPEC)[0]


def run_tick(engine: SlurmEngine) -> None:
    """Run one tick of the controller."""
    engine.place()
    engine.observe()
    engine.cancel()
    engine.start()


def wait_for_status(engine: SlurmEngine, job: Job, status: Status) -> Job:
    def reached() -> bool:
        run_tick(engine)
        job.refresh_from_db()
        return job.status == status

    wait_until(reached, f"{job.id} is {status}", 60)
    return job


def _idle(engine: SlurmEngine) -> bool:
    return not engine._thread.busy


def get_last_reason(job: Job) -> str:
    return job.history.values_list("reason", flat=True).last() or ""


def list_slurm_jobs(job: Job, attempt: int = 1) -> list[SlurmJob]:
    return [found for found in SLURM.list_jobs() if found.name == format_job_name(job.id, attempt)]


def test_job_is_submitted_in_its_first_tick_and_followed(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    run_tick(engine)
    (found,) = list_slurm_jobs(job)
    assert Attempt.objects.get(job=job).engine_id == found.id
    wait_for_status(engine, job, Status.STARTING)
    assert get_last_reason(job) == f"Running on node0: Slurm job {found.id}, partition main"


def test_controller_killed_between_sbatch_and_saving_the_id_starts_no_second_job(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)

    def sent() -> list[SlurmJob]:
        run_tick(engine)
        return list_slurm_jobs(job)

    (found,) = wait_until(sent, "Slurm has it", 60)
    Attempt.objects.update(engine_id="")
    wait_for_status(SlurmEngine(site), job, Status.STARTING)
    assert [other.id for other in list_slurm_jobs(job)] == [found.id]
    assert Attempt.objects.get().engine_id == found.id


def test_two_concurrent_controllers_leave_one_running_job(
    site: Site, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = SlurmEngine(site), SlurmEngine(site)
    first.place()
    for engine in (first, second):  # both controllers polled and found nothing
        engine.observe()
        wait_until(partial(_idle, engine), "it has looked")
    look = Slurm.list_jobs
    # one controller polls again just before the other submits
    monkeypatch.setattr(Slurm, "list_jobs", lambda _self: [])
    first.start()
    Attempt.objects.update(engine_id="")
    second.start()
    monkeypatch.setattr(Slurm, "list_jobs", look)
    assert len(list_slurm_jobs(job)) == 2
    wait_for_status(second, job, Status.STARTING)
    assert RunToken.objects.filter(attempt__job=job).count() == 1, "one of the two speaks for the attempt"
    noted = Attempt.objects.get().engine_id

    def only_the_noted() -> bool:
        run_tick(second)
        return {found.id for found in list_slurm_jobs(job) if found.state in ("RUNNING", "PENDING")} == {noted}

    wait_until(only_the_noted, "one of the two is left", 30)


def test_job_rejected_by_slurm_fails_with_its_message(site: Site) -> None:
    owner = User.objects.create_user("owner")
    spec = {**SPEC, "resources": {"engine": "slurm", "slurm": {"partition": "nowhere"}}}
    job = wait_for_status(SlurmEngine(site), actions.submit(owner, spec)[0], Status.FAILED)
    assert get_last_reason(job).lower() == "slurm rejected the job: invalid partition name specified"


def test_job_cancelled_before_submission_is_cancelled_locally(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    engine.place()
    actions.cancel(job, "owner")
    wait_for_status(engine, job, Status.CANCELLED)
    assert list_slurm_jobs(job) == []


def test_job_cancelled_in_slurm_reports_it(site: Site, job: Job, slurm: Cluster) -> None:
    engine = SlurmEngine(site)
    wait_for_status(engine, job, Status.STARTING)
    slurm.command("scancel", Attempt.objects.get().engine_id)
    wait_for_status(engine, job, Status.FAILED)
    assert get_last_reason(job).startswith("Slurm: the job was cancelled in Slurm, not in Meshboard")


def test_new_attempt_waits_until_the_previous_slurm_job_is_gone(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    wait_for_status(engine, job, Status.STARTING)
    # the supervisor reported the end, and Slurm's job still exists
    Attempt.objects.update(ended="2026-01-01T00:00:00Z")
    Job.objects.update(status=Status.FAILED)
    actions.requeue(job, "owner")
    wait_for_status(engine, job, Status.STARTING)
    (first,), (second,) = list_slurm_jobs(job, 1), list_slurm_jobs(job, 2)
    assert (first.state, second.state) == ("CANCELLED", "RUNNING")


def test_jobs_wait_but_ticks_continue_while_login_node_is_down(
    slurm: Cluster, site: Site, login: Login, settings: Any
) -> None:
    remote = site._replace(login=login.address, ssh_config=str(login.config))
    login.stop()
    engine = SlurmEngine(remote)
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]

    def is_reported() -> bool:
        run_tick(engine)
        job.refresh_from_db()
        return job.wait_reason.startswith("Cannot query Slurm: Cannot reach the login node root@login")

    wait_until(is_reported, "the reason is reported", 30)
    login.start()
    wait_for_status(engine, job, Status.STARTING)
    assert len(list_slurm_jobs(job)) == 1


def test_job_forgotten_by_slurm_is_lost(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    engine.place()
    Attempt.objects.update(engine_id="999999")
    wait_for_status(engine, job, Status.LOST)
    assert get_last_reason(job) == ("Slurm no longer knows job 999999, and Slurm accounting (sacct) is off")


@pytest.fixture
def waiting(slurm: Cluster, site: Site, job: Job) -> Iterator[SlurmEngine]:
    """Return the engine whose job waits in Slurm's queue. The job starts after `blocker` is cancelled."""
    slurm.submit_script("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5", "--job-name=blocker")
    engine = SlurmEngine(site)

    def is_reported() -> bool:
        run_tick(engine)
        return [found.state for found in list_slurm_jobs(job)] == [
            "PENDING"
        ] and Attempt.objects.get().engine_told != {}

    wait_until(is_reported, "the job waits in Slurm", 30)
    yield engine
    slurm.command("scancel", "--name=blocker")


BARS: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "The queue is paused": (
        lambda _: staff_actions.pause_queue(True, "staff"),
        lambda _: staff_actions.pause_queue(False, "staff"),
    ),
    "held": (lambda job: staff_actions.hold([job], "staff"), lambda job: staff_actions.release([job], "staff")),
    "disabled": (lambda _: User.objects.update(is_active=False), lambda _: User.objects.update(is_active=True)),
}


@pytest.mark.parametrize("reason", BARS)
def test_waiting_job_starts_only_if_the_board_does_not_hold_it(
    slurm: Cluster, waiting: SlurmEngine, job: Job, reason: str
) -> None:
    def stands(held: bool, words: str) -> bool:
        run_tick(waiting)
        (found,) = list_slurm_jobs(job)
        job.refresh_from_db()
        there, here = found.reason == "JobHeldUser", "held" in Attempt.objects.get().engine_told
        return (there, here, words in job.wait_reason) == (held, held, True)

    bar, lift = BARS[reason]
    bar(job.id)
    wait_until(lambda: stands(True, reason), "it is held", 30)
    lift(job.id)
    wait_until(lambda: stands(False, "Slurm: "), "it is free", 30)
    bar(job.id)
    wait_until(lambda: stands(True, reason), "it is held again", 30)
    slurm.command("scancel", "--name=blocker")
    free = slurm.submit_script("#!/bin/sh\ntrue\n", "--nodes=2", "--exclusive")
    wait_until(lambda: slurm.get_job_state(free) == "COMPLETED", "another begins and ends on all nodes", 60)
    assert stands(True, reason)
    lift(job.id)
    wait_for_status(waiting, job, Status.STARTING)


def test_job_held_by_its_user_in_slurm_is_not_released(slurm: Cluster, waiting: SlurmEngine, job: Job) -> None:
    slurm.command("scontrol", "uhold", Attempt.objects.get().engine_id)

    def is_reported() -> bool:
        run_tick(waiting)
        job.refresh_from_db()
        return "held by its user" in job.wait_reason

    wait_until(is_reported, "the hold is reported", 30)
    assert "held" not in Attempt.objects.get().engine_told
    assert list_slurm_jobs(job)[0].reason == "JobHeldUser"
