"""Submit one reference check of a run that was not compared with a single process."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from jobs.models import Attempt, Job, Status
from jobs.queue import actions, derived_jobs
from tests.planner.wrong_specs import GOOD

LARGE = {
    **GOOD,
    "model": {"preset": "llama3-8b"},
    "train": {"global_batch": 8, "micro_batches": 2, "seq_len": 64},
}


def run(owner: User, **train: Any) -> Job:
    made, _ = actions.submit(owner, {**GOOD, "name": "long", "train": {**GOOD.get("train", {}), **train}})
    return made


def pressed(client: Client, job: Job, page: str) -> Any:
    (key,) = re.findall(r'name="form_key" value="([^"]{16,})"', page)
    return client.post(f"/jobs/{job.id}/check/", {"form_key": key})


def page_of(client: Client, job: Job) -> str:
    return client.get(f"/jobs/{job.id}/").content.decode()


def test_button_queues_one_short_verified_copy(owner: User, client: Client) -> None:
    job = run(owner, steps=500, warmup_steps=50, checkpoint_every=100, eval_every=10, verify="off", seed=7)
    client.force_login(owner)
    page = page_of(client, job)
    assert "Meshboard submits this run again with 3 steps" in page
    first, again = pressed(client, job, page), pressed(client, job, page)
    made = Job.objects.exclude(id=job.id).get()
    assert first["Location"] == again["Location"] == f"/jobs/{made.id}/"
    assert (made.check_of, made.name) == (job, "reference check of long")
    train = {"steps": 3, "warmup_steps": 3, "verify": "on", "checkpoint_every": 0, "eval_every": 0}
    assert made.spec == {**job.spec, "name": made.name, "train": {**job.spec["train"], **train}}
    link = f'<a href="/jobs/{made.id}/#proof">Reference check</a>: <span data-check>queued</span>'
    assert link in page_of(client, job)
    assert f'reference check of <a href="/jobs/{job.id}/#proof">long</a>' in page_of(client, made)


def test_check_of_a_short_run_has_its_steps(owner: User) -> None:
    assert derived_jobs.build_check_spec(run(owner, steps=2))["train"]["steps"] == 2


def test_check_of_a_resumed_run_starts_without_checkpoint(owner: User) -> None:
    source = run(owner, steps=20, checkpoint_every=5)
    Job.objects.filter(id=source.id).update(status=Status.RUNNING)
    job = run(owner, steps=40, resume=source.id)
    made, _ = actions.submit(owner, derived_jobs.build_check_spec(job))
    assert (made.spec["train"]["resume"], made.spec["train"]["steps"]) == (None, 3)


def test_large_run_cannot_be_checked(owner: User, client: Client) -> None:
    job, _ = actions.submit(owner, LARGE)
    client.force_login(owner)
    page = page_of(client, job)
    assert "Reference check unavailable: the single-process reference needs 24 B x 8,030,261,248 parameters" in page
    assert f"/jobs/{job.id}/check/" not in page


def test_page_hides_foreign_checks(owner: User, staff: User, client: Client) -> None:
    job = run(owner)
    actions.submit(staff, derived_jobs.build_check_spec(job), check_of=job)
    assert (derived_jobs.get_newest_check(owner, job), derived_jobs.get_newest_check(staff, job) is None) == (
        None,
        False,
    )
    client.force_login(owner)
    assert "Reference check:" not in page_of(client, job)


def test_page_shows_the_result_of_a_check(owner: User) -> None:
    job = run(owner)
    made, _ = actions.submit(owner, derived_jobs.build_check_spec(job), check_of=job)
    told = {"id": made.id, "name": "reference check of long", "status": "queued", "finished": False, "proof": None}
    assert derived_jobs.get_newest_check(owner, job) == told
    proof = {"one_process": {"state": "equal"}}
    Attempt.objects.create(job=made, number=1, exit={"summary": {"proof": proof}})
    Job.objects.filter(id=made.id).update(status=Status.SUCCEEDED)
    assert derived_jobs.get_newest_check(owner, job) == {
        **told,
        "status": "succeeded",
        "finished": True,
        "proof": proof,
    }


@pytest.mark.parametrize("kind", ["dry_run", "calibrate", "script"])
def test_only_training_runs_can_be_checked(owner: User, client: Client, kind: str) -> None:
    job = run(owner)
    Job.objects.filter(id=job.id).update(kind=kind, spec={**job.spec, "kind": kind})
    client.force_login(owner)
    assert client.post(f"/jobs/{job.id}/check/").status_code == 404
