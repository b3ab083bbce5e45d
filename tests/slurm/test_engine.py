"""The engine's passes on a real Slurm and a real database: cut off anywhere, it starts no attempt twice."""

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


def work(engine: SlurmEngine) -> None:
    """One tick of the controller."""
    engine.place()
    engine.observe()
    engine.cancel()
    engine.start()


def until(engine: SlurmEngine, job: Job, status: Status) -> Job:
    def reached() -> bool:
        work(engine)
        job.refresh_from_db()
        return job.status == status

    wait_until(reached, f"{job.id} is {status}", 60)
    return job


def _idle(engine: SlurmEngine) -> bool:
    return not engine._thread.busy


def last_word(job: Job) -> str:
    return job.history.values_list("reason", flat=True).last() or ""


def in_slurm(job: Job, attempt: int = 1) -> list[SlurmJob]:
    return [found for found in SLURM.list_jobs() if found.name == format_job_name(job.id, attempt)]


def test_a_job_is_submitted_in_its_first_tick_and_followed(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    work(engine)
    (found,) = in_slurm(job)
    assert Attempt.objects.get(job=job).engine_id == found.id
    until(engine, job, Status.STARTING)
    assert last_word(job) == f"Running on node0: Slurm job {found.id}, partition main"


def test_a_controller_killed_between_sbatch_and_noting_the_id_starts_no_second_job(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)

    def sent() -> list[SlurmJob]:
        work(engine)
        return in_slurm(job)

    (found,) = wait_until(sent, "Slurm has it", 60)
    Attempt.objects.update(engine_id="")
    until(SlurmEngine(site), job, Status.STARTING)
    assert [other.id for other in in_slurm(job)] == [found.id]
    assert Attempt.objects.get().engine_id == found.id


def test_of_two_controllers_at_once_one_s_job_runs_and_the_other_s_ends(
    site: Site, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = SlurmEngine(site), SlurmEngine(site)
    first.place()
    for engine in (first, second):  # both have looked, and found nothing
        engine.observe()
        wait_until(partial(_idle, engine), "it has looked")
    look = Slurm.list_jobs
    monkeypatch.setattr(Slurm, "list_jobs", lambda _self: [])  # and look again just before the other submits
    first.start()
    Attempt.objects.update(engine_id="")
    second.start()
    monkeypatch.setattr(Slurm, "list_jobs", look)
    assert len(in_slurm(job)) == 2
    until(second, job, Status.STARTING)
    assert RunToken.objects.filter(attempt__job=job).count() == 1, "one of the two speaks for the attempt"
    noted = Attempt.objects.get().engine_id

    def only_the_noted() -> bool:
        work(second)
        return {found.id for found in in_slurm(job) if found.state in ("RUNNING", "PENDING")} == {noted}

    wait_until(only_the_noted, "one of the two is left", 30)


def test_what_slurm_refuses_fails_in_its_words(site: Site) -> None:
    owner = User.objects.create_user("owner")
    spec = {**SPEC, "resources": {"engine": "slurm", "slurm": {"partition": "nowhere"}}}
    job = until(SlurmEngine(site), actions.submit(owner, spec)[0], Status.FAILED)
    assert last_word(job).lower() == "slurm rejected the job: invalid partition name specified"


def test_cancelled_while_slurm_was_never_asked_it_is_cancelled_here(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    engine.place()
    actions.cancel(job, "owner")
    until(engine, job, Status.CANCELLED)
    assert in_slurm(job) == []


def test_cancelled_from_outside_it_says_so(site: Site, job: Job, slurm: Cluster) -> None:
    engine = SlurmEngine(site)
    until(engine, job, Status.STARTING)
    slurm.command("scancel", Attempt.objects.get().engine_id)
    until(engine, job, Status.FAILED)
    assert last_word(job).startswith("Slurm: the job was cancelled in Slurm, not in Meshboard")


def test_a_new_attempt_waits_until_slurm_has_nothing_left_of_the_one_before(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    until(engine, job, Status.STARTING)
    Attempt.objects.update(ended="2026-01-01T00:00:00Z")  # by its supervisor's word; Slurm's job lingers
    Job.objects.update(status=Status.FAILED)
    actions.requeue(job, "owner")
    until(engine, job, Status.STARTING)
    (first,), (second,) = in_slurm(job, 1), in_slurm(job, 2)
    assert (first.state, second.state) == ("CANCELLED", "RUNNING")


def test_while_the_login_node_is_down_jobs_wait_and_no_tick_does(
    slurm: Cluster, site: Site, login: Login, settings: Any
) -> None:
    remote = site._replace(login=login.address, ssh_config=str(login.config))
    login.stop()
    engine = SlurmEngine(remote)
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]

    def told() -> bool:
        work(engine)
        job.refresh_from_db()
        return job.wait_reason.startswith("Cannot query Slurm: Cannot reach the login node root@login")

    wait_until(told, "the reason is told", 30)
    login.start()
    until(engine, job, Status.STARTING)
    assert len(in_slurm(job)) == 1


def test_a_job_that_slurm_forgot_is_lost(site: Site, job: Job) -> None:
    engine = SlurmEngine(site)
    engine.place()
    Attempt.objects.update(engine_id="999999")
    until(engine, job, Status.LOST)
    assert last_word(job) == ("Slurm no longer knows job 999999, and Slurm accounting (sacct) is off")


@pytest.fixture
def waiting(slurm: Cluster, site: Site, job: Job) -> Iterator[SlurmEngine]:
    """The engine, whose job waits in Slurm's queue: its nodes are taken until `blocker` is cancelled."""
    slurm.batch("#!/bin/sh\nsleep 300\n", "--nodes=2", "--exclusive", "--time=5", "--job-name=blocker")
    engine = SlurmEngine(site)

    def told() -> bool:
        work(engine)
        return [found.state for found in in_slurm(job)] == ["PENDING"] and Attempt.objects.get().engine_told != {}

    wait_until(told, "it waits there", 30)
    yield engine
    slurm.command("scancel", "--name=blocker")


BARS: dict[str, tuple[Callable[[str], object], Callable[[str], object]]] = {
    "the queue is paused": (
        lambda _: staff_actions.pause_queue(True, "staff"),
        lambda _: staff_actions.pause_queue(False, "staff"),
    ),
    "held": (lambda job: staff_actions.hold([job], "staff"), lambda job: staff_actions.release([job], "staff")),
    "disabled": (lambda _: User.objects.update(is_active=False), lambda _: User.objects.update(is_active=True)),
}


@pytest.mark.parametrize("reason", BARS)
def test_what_waits_there_begins_only_when_nothing_bars_it_here(
    slurm: Cluster, waiting: SlurmEngine, job: Job, reason: str
) -> None:
    def stands(held: bool, words: str) -> bool:
        work(waiting)
        (found,) = in_slurm(job)
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
    free = slurm.batch("#!/bin/sh\ntrue\n", "--nodes=2", "--exclusive")
    wait_until(lambda: slurm.state_of(free) == "COMPLETED", "another begins and ends on all nodes", 60)
    assert stands(True, reason)
    lift(job.id)
    until(waiting, job, Status.STARTING)


def test_what_its_user_holds_there_is_not_released(slurm: Cluster, waiting: SlurmEngine, job: Job) -> None:
    slurm.command("scontrol", "uhold", Attempt.objects.get().engine_id)

    def told() -> bool:
        work(waiting)
        job.refresh_from_db()
        return "held by its user" in job.wait_reason

    wait_until(told, "it is told", 30)
    assert "held" not in Attempt.objects.get().engine_told
    assert in_slurm(job)[0].reason == "JobHeldUser"
