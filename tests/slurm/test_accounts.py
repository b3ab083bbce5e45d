"""Slurm with accounts: `sacct` reports how a job ended that slurmctld has forgotten."""

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
from tests.slurm.test_engine import SPEC, get_last_reason, wait_for_status
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

SLURM = Slurm(CommandRunner())


def wait_for_accounting(slurm: Cluster, job: Job) -> SlurmJob:
    """Return the accounting of a job after slurmctld has forgotten it."""
    name = format_job_name(job.id, 1)
    wait_until(lambda: not any(found.name == name for found in SLURM.list_jobs()), "slurmctld has forgotten it", 90)
    (found,) = SLURM.list_accounted_jobs([name]) or []
    return found


def test_end_of_forgotten_job_is_read_from_accounts(accounted: Cluster, site: Site) -> None:
    Path(site.python).write_text("#!/bin/sh\nexit 3\n")
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]
    engine = SlurmEngine(site)
    until_submitted(engine, job)
    record = wait_for_accounting(accounted, job)  # while no controller polls
    assert (record.state, record.exit, record.nodes, record.partition) == ("FAILED", "3:0", "node0", "main")
    assert record.elapsed_s is not None
    assert record.elapsed_s < 60
    wait_for_status(SlurmEngine(site), job, Status.FAILED)
    assert re.fullmatch(
        rf"Slurm: the batch script failed; job {record.id} on node0, FAILED, exit code 3, after 0:00:\d\d.*",
        get_last_reason(job),
    )
    assert Attempt.objects.get().engine_told == {"state": "FAILED", "partition": "main", "nodes": "node0"}


def until_submitted(engine: SlurmEngine, job: Job) -> None:
    def noted() -> bool:
        engine.place()
        engine.observe()
        engine.start()
        return Attempt.objects.filter(job=job).exclude(engine_id="").exists()

    wait_until(noted, "it is submitted", 30)


def test_missing_accounting_is_reported_as_missing(accounted: Cluster, site: Site) -> None:
    job = actions.submit(User.objects.create_user("owner"), SPEC)[0]
    engine = SlurmEngine(site)
    engine.place()
    Attempt.objects.update(engine_id="999999")
    wait_for_status(engine, job, Status.LOST)
    assert get_last_reason(job) == "Slurm has no record of how job 999999 ended"
    Path(site.python).write_text("#!/bin/sh\n")
    assert [found.words for found in check_site(site) if found.level == "ok"] == ["Slurm accounting (sacct) is on"]
