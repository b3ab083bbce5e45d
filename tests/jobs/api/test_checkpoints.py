"""Lists of checkpoints, and validation of the checkpoint that a job resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from rest_framework.test import APIClient

from jobs.models import Attempt, Host, Job, Status
from jobs.queue import actions
from tests.jobs.history.sample_telemetry import batch, record_batches
from tests.jobs.planning.test_measured_runs import end_run, make_summary, start_run
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
SAVING = {"train": {**GOOD["train"], "steps": 20, "checkpoint_every": 5, "keep_checkpoints": 2}}


@pytest.fixture(autouse=True)
def _a_board(tmp_path: Path, settings: Any, make_host: Callable[..., Host]) -> None:
    cache.clear()
    settings.HISTORY_DIR = tmp_path
    make_host()


def make_checkpoint_items(job: str, *steps: int, failed: int = 0) -> list[dict[str, Any]]:
    """Build the checkpoint items of an attempt."""
    common = {"kind": "checkpoint", "rank": 0, "num_bytes": 10, "stall_s": 0.1, "save_s": 0.2}
    return [
        {
            **common,
            "time": 1_760_000_000.0 + step,
            "step": step,
            "name": None if step == failed else name(job, step),
            "problem": "disk full" if step == failed else "",
        }
        for step in steps
    ]


def name(job: str, step: int, attempt: int = 1) -> str:
    return f"{job}/{attempt}/step-{step:08d}"


def end_attempt(attempt: Attempt, *steps: int, outcome: str = "succeeded", failed: int = 0) -> str:
    """End an attempt that has saved checkpoints at these steps."""
    run_summary = {**make_summary(0.3), "checkpoints": make_checkpoint_items(attempt.job_id, *steps, failed=failed)}
    Attempt.objects.filter(pk=attempt.pk).update(exit={"outcome": outcome, "summary": run_summary})
    Job.objects.filter(pk=attempt.job_id).update(status=Status.SUCCEEDED if outcome == "succeeded" else Status.LOST)
    return attempt.job_id


def resume_from(client: APIClient, job: str, checkpoint: str) -> Any:
    return client.post(f"/api/v1/jobs/{job}/resume", {"checkpoint": checkpoint}, format="json")


def test_list_shows_which_checkpoints_exist(owner: User, api: Api) -> None:
    job = end_attempt(start_run(owner, **SAVING), 5, 10, 15, 20, failed=15)
    checkpoints = api(owner).get(f"/api/v1/jobs/{job}/checkpoints").json()
    assert [(one["step"], one["kept"]) for one in checkpoints] == [(20, True), (15, False), (10, True), (5, False)]


def test_lists_the_last_checkpoint_of_a_failed_attempt(owner: User, api: Api) -> None:
    attempt = start_run(owner, **SAVING)
    Attempt.objects.filter(pk=attempt.pk).update(checkpoint=name(attempt.job_id, 10))
    (checkpoints,) = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/checkpoints").json()
    assert (checkpoints["name"], checkpoints["kept"]) == (name(attempt.job_id, 10), True)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (5, "has 2 newer checkpoints and keeps only 2"),
        (7, "has 2 newer checkpoints and keeps only 2"),
        (12, "saved no checkpoint at step 12. The latest checkpoints are at steps 5, 10, 20"),
        (15, "writing it failed: disk full"),
        (21, "has 20 steps"),
    ],
)
def test_rejects_missing_checkpoints(owner: User, api: Api, step: int, message: str) -> None:
    job = end_attempt(start_run(owner, **SAVING), 5, 10, 15, 20, failed=15)
    refused = resume_from(api(owner), job, name(job, step))
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["pointer"]) == (422, "/checkpoint")
    assert message in error["message"]
    resume = {"train": {"resume": name(job, step)}}
    for path, body in ((f"jobs/{job}/copy", resume), ("jobs", {**GOOD, **resume})):
        (error,) = api(owner).post(f"/api/v1/{path}", body, format="json").json()["errors"]
        assert error["pointer"] == "/train/resume"
        assert message in error["message"]
    (blocked,) = api(owner).post("/api/v1/plan", {**GOOD, **resume}, format="json").json()["not_runnable"]
    assert message in blocked["message"]


def test_accepts_checkpoints_that_can_exist(owner: User, api: Api) -> None:
    job = end_attempt(start_run(owner, **SAVING), 5, 10, outcome="failed")
    for step in (5, 10, 15):  # It can have failed after it saved step 15 and before it reported this.
        assert resume_from(api(owner), job, name(job, step)).status_code == 201
    assert resume_from(api(owner), job, job).status_code == 201


def test_rejects_a_checkpoint_with_all_steps_done(owner: User, api: Api) -> None:
    job = end_attempt(start_run(owner, **SAVING), 5, 10, outcome="failed")
    newest, message = name(job, 10), "already has 10 steps. Use 11 or more."
    client, fewer_steps = api(owner), {"train": {"steps": 9, "warmup_steps": 1}}
    for checkpoint in ({"checkpoint": newest}, {"checkpoint": job}, {"checkpoint": f"{job}/1"}):
        refused = client.post(f"/api/v1/jobs/{job}/resume", {**checkpoint, "change": fewer_steps}, format="json")
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["field"], error["pointer"]) == (422, "train.steps", "/change/train/steps")
        assert message in error["message"]
    spec = {**GOOD, "train": {**GOOD["train"], **fewer_steps["train"], "resume": newest}}
    (error,) = client.post("/api/v1/jobs", spec, format="json").json()["errors"]
    assert (error["pointer"], message in error["message"]) == ("/train/steps", True)
    (blocked,) = client.post("/api/v1/plan", spec, format="json").json()["not_runnable"]
    assert (blocked["field"], message in blocked["message"]) == ("train.steps", True)
    for steps, status in ((10, 422), (11, 201)):
        change = {"checkpoint": newest, "change": {"train": {"steps": steps, "warmup_steps": 1}}}
        assert client.post(f"/api/v1/jobs/{job}/resume", change, format="json").status_code == status
    older = {"checkpoint": name(job, 5), "change": fewer_steps}
    assert client.post(f"/api/v1/jobs/{job}/resume", older, format="json").status_code == 201


def test_accepts_checkpoints_in_a_telemetry_gap(owner: User, api: Api, tmp_path: Path) -> None:
    job = start_run(owner, **SAVING).job_id
    (first, last) = make_checkpoint_items(job, 5, 15)
    gap = {"kind": "gap", "time": last["time"], "items": 1}
    record_batches(tmp_path, [batch(1, first), batch(2, gap), batch(3, last)], job)
    assert resume_from(api(owner), job, name(job, 10)).status_code == 201
    whole = actions.submit(owner, {**GOOD, **SAVING})[0].id
    Attempt.objects.create(job_id=whole, number=1)
    record_batches(
        tmp_path, [batch(1, *make_checkpoint_items(whole, 5)), batch(3, *make_checkpoint_items(whole, 15))], whole
    )
    assert resume_from(api(owner), whole, name(whole, 10)).status_code == 422
    assert resume_from(api(owner), whole, name(whole, 19)).status_code == 201, "the run can still save this step"


def test_rejects_checkpoints_of_a_job_without_any(owner: User, api: Api) -> None:
    without_checkpoints = end_run(owner, make_summary(0.3)).job_id
    assert (
        "`train.checkpoint_every` is 0"
        in resume_from(api(owner), without_checkpoints, without_checkpoints).json()["errors"][0]["message"]
    )
    saving = end_attempt(start_run(owner, **SAVING))
    for checkpoint, message in (
        (saving, "the job saved no such checkpoint"),
        (f"{saving}/1", "the job saved no such checkpoint"),
        (f"{saving}/2", "has no attempt 2"),
        (f"{saving}/1/step-5", "a checkpoint name has the form JOB, JOB/ATTEMPT, or JOB/ATTEMPT/step-00000100"),
        (f"{saving}/./1/step-00000005", "a checkpoint name has the form"),
    ):
        assert message in resume_from(api(owner), saving, checkpoint).json()["errors"][0]["message"]
    waiting, _ = actions.submit(owner, {**GOOD, **SAVING})
    after = {**GOOD, "after": [waiting.id], "train": {**GOOD["train"], "resume": f"{waiting.id}/1"}}
    assert api(owner).post("/api/v1/jobs", after, format="json").status_code == 201, (
        "the other job has not saved checkpoints yet"
    )
