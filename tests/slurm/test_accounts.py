"""A Slurm with accounts: how a job ended that slurmctld has forgotten is read from `sacct`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from jobs.models import Attempt, Job, Status
from jobs.queue import actions
from jobs.queue.slurm.commands import CommandRunner, Slurm, check_site
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import Site
from jobs.queue.slurm.states import SlurmJob, format_job_name
from tests.slurm.cluster import Cluster
from tests.slurm.test_engine import SPEC, last_word, until
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SLURM = Slurm(CommandRunner())


def remembered(slurm: Cluster, job: Job) -> SlurmJob:
    """Return the accounting of a job after slurmctld has forgotten it."""
    name = format_job_name(job.id, 1)
    wait_until(lambda: not any(found.name == name for found in SLURM.list_jobs()), "slurmctld has forgotten it", 90)
    (found,) = SLURM.list_accounted_jobs([name]) or []
    return found


def test_how_a_job_ended_that_slurmctld_forgot_is_read_from_its_accounts(accounted: Cluster, site: Site) -> None:
    Path(site.python).write_text("#!/bin/sh\nexit 3\n")
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]
    engine = SlurmEngine(site)
    until_submitted(engine, job)
    told = remembered(accounted, job)  # while no controller looks
    assert (told.state, told.exit, told.nodes, told.partition) == ("FAILED", "3:0", "node0", "main")
    assert told.elapsed_s is not None
    assert told.elapsed_s < 60
    until(SlurmEngine(site), job, Status.FAILED)
    assert re.fullmatch(
        rf"Slurm: the batch script failed; job {told.id} on node0, FAILED, exit code 3, after 0:00:\d\d.*",
        last_word(job),
    )
    assert Attempt.objects.get().engine_told == {"state": "FAILED", "partition": "main", "nodes": "node0"}


def until_submitted(engine: SlurmEngine, job: Job) -> None:
    def noted() -> bool:
        engine.place()
        engine.observe()
        engine.start()
        return Attempt.objects.filter(job=job).exclude(engine_id="").exists()

    wait_until(noted, "it is submitted", 30)


def test_of_what_the_accounts_do_not_know_they_are_said_to_say_nothing(accounted: Cluster, site: Site) -> None:
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]
    engine = SlurmEngine(site)
    engine.place()
    Attempt.objects.update(engine_id="999999")
    until(engine, job, Status.LOST)
    assert last_word(job) == "Slurm has no record of how job 999999 ended"
    Path(site.python).write_text("#!/bin/sh\n")
    assert [found.words for found in check_site(site) if found.level == "ok"] == ["Slurm accounting (sacct) is on"]
