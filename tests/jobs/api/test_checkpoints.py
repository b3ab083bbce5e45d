"""Checkpoints over REST: which are there, and which a job is not queued to go on from."""

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


def saved(job: str, *steps: int, failed: int = 0) -> list[dict[str, Any]]:
    """What an attempt told of its saves."""
    some = {"kind": "checkpoint", "rank": 0, "num_bytes": 10, "stall_s": 0.1, "save_s": 0.2}
    return [
        {
            **some,
            "time": 1_760_000_000.0 + step,
            "step": step,
            "name": None if step == failed else name(job, step),
            "problem": "disk full" if step == failed else "",
        }
        for step in steps
    ]


def name(job: str, step: int, attempt: int = 1) -> str:
    return f"{job}/{attempt}/step-{step:08d}"


def leave(attempt: Attempt, *steps: int, outcome: str = "succeeded", failed: int = 0) -> str:
    """End an attempt that told of these."""
    told = {**make_summary(0.3), "checkpoints": saved(attempt.job_id, *steps, failed=failed)}
    Attempt.objects.filter(pk=attempt.pk).update(exit={"outcome": outcome, "summary": told})
    Job.objects.filter(pk=attempt.job_id).update(status=Status.SUCCEEDED if outcome == "succeeded" else Status.LOST)
    return attempt.job_id


def resumed(client: APIClient, job: str, checkpoint: str) -> Any:
    return client.post(f"/api/v1/jobs/{job}/resume", {"checkpoint": checkpoint}, format="json")


def test_a_list_says_which_are_kept(owner: User, api: Api) -> None:
    job = leave(start_run(owner, **SAVING), 5, 10, 15, 20, failed=15)
    told = api(owner).get(f"/api/v1/jobs/{job}/checkpoints").json()
    assert [(one["step"], one["kept"]) for one in told] == [(20, True), (15, False), (10, True), (5, False)]


def test_the_newest_that_a_dead_attempt_told_of_is_kept(owner: User, api: Api) -> None:
    attempt = start_run(owner, **SAVING)
    Attempt.objects.filter(pk=attempt.pk).update(checkpoint=name(attempt.job_id, 10))
    (told,) = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/checkpoints").json()
    assert (told["name"], told["kept"]) == (name(attempt.job_id, 10), True)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (5, "has 2 newer checkpoints and keeps only 2"),
        (7, "has 2 newer checkpoints and keeps only 2"),
        (12, "saved no checkpoint at step 12. The latest checkpoints are at steps 5, 10, 20"),
        (15, "writing it failed: disk full"),
        (21, "has 20 steps"),
    ],
)
def test_what_is_known_to_be_gone_is_not_gone_on_from(owner: User, api: Api, step: int, words: str) -> None:
    job = leave(start_run(owner, **SAVING), 5, 10, 15, 20, failed=15)
    refused = resumed(api(owner), job, name(job, step))
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["pointer"]) == (422, "/checkpoint")
    assert words in error["message"]
    resume = {"train": {"resume": name(job, step)}}
    for path, body in ((f"jobs/{job}/copy", resume), ("jobs", {**GOOD, **resume})):
        (error,) = api(owner).post(f"/api/v1/{path}", body, format="json").json()["errors"]
        assert error["pointer"] == "/train/resume"
        assert words in error["message"]
    (blocked,) = api(owner).post("/api/v1/plan", {**GOOD, **resume}, format="json").json()["not_runnable"]
    assert words in blocked["message"]


def test_what_may_be_there_is_gone_on_from(owner: User, api: Api) -> None:
    job = leave(start_run(owner, **SAVING), 5, 10, outcome="failed")
    for step in (5, 10, 15):  # it may have died between saving step 15 and telling of it
        assert resumed(api(owner), job, name(job, step)).status_code == 201
    assert resumed(api(owner), job, job).status_code == 201


def test_a_checkpoint_that_has_done_all_that_is_asked_for_is_not_gone_on_from(owner: User, api: Api) -> None:
    job = leave(start_run(owner, **SAVING), 5, 10, outcome="failed")
    newest, words = name(job, 10), "already has 10 steps. Use 11 or more."
    client, few = api(owner), {"train": {"steps": 9, "warmup_steps": 1}}
    for checkpoint in ({"checkpoint": newest}, {"checkpoint": job}, {"checkpoint": f"{job}/1"}):
        refused = client.post(f"/api/v1/jobs/{job}/resume", {**checkpoint, "change": few}, format="json")
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["field"], error["pointer"]) == (422, "train.steps", "/change/train/steps")
        assert words in error["message"]
    spec = {**GOOD, "train": {**GOOD["train"], **few["train"], "resume": newest}}
    (error,) = client.post("/api/v1/jobs", spec, format="json").json()["errors"]
    assert (error["pointer"], words in error["message"]) == ("/train/steps", True)
    (blocked,) = client.post("/api/v1/plan", spec, format="json").json()["not_runnable"]
    assert (blocked["field"], words in blocked["message"]) == ("train.steps", True)
    for steps, status in ((10, 422), (11, 201)):
        change = {"checkpoint": newest, "change": {"train": {"steps": steps, "warmup_steps": 1}}}
        assert client.post(f"/api/v1/jobs/{job}/resume", change, format="json").status_code == status
    older = {"checkpoint": name(job, 5), "change": few}
    assert client.post(f"/api/v1/jobs/{job}/resume", older, format="json").status_code == 201


def test_nothing_is_known_of_what_was_lost_on_the_way(owner: User, api: Api, tmp_path: Path) -> None:
    job = start_run(owner, **SAVING).job_id
    (first, last) = saved(job, 5, 15)
    gap = {"kind": "gap", "time": last["time"], "items": 1}
    record_batches(tmp_path, [batch(1, first), batch(2, gap), batch(3, last)], job)
    assert resumed(api(owner), job, name(job, 10)).status_code == 201
    whole = actions.submit(owner, {**GOOD, **SAVING})[0].id
    Attempt.objects.create(job_id=whole, number=1)
    record_batches(tmp_path, [batch(1, *saved(whole, 5)), batch(3, *saved(whole, 15))], whole)
    assert resumed(api(owner), whole, name(whole, 10)).status_code == 422
    assert resumed(api(owner), whole, name(whole, 19)).status_code == 201, "it runs"


def test_a_job_that_saved_none_has_none(owner: User, api: Api) -> None:
    none = end_run(owner, make_summary(0.3)).job_id
    assert "`train.checkpoint_every` is 0" in resumed(api(owner), none, none).json()["errors"][0]["message"]
    saving = leave(start_run(owner, **SAVING))
    for checkpoint, words in (
        (saving, "the job saved no such checkpoint"),
        (f"{saving}/1", "the job saved no such checkpoint"),
        (f"{saving}/2", "has no attempt 2"),
        (f"{saving}/1/step-5", "a checkpoint name has the form JOB, JOB/ATTEMPT, or JOB/ATTEMPT/step-00000100"),
        (f"{saving}/./1/step-00000005", "a checkpoint name has the form"),
    ):
        assert words in resumed(api(owner), saving, checkpoint).json()["errors"][0]["message"]
    waiting, _ = actions.submit(owner, {**GOOD, **SAVING})
    after = {**GOOD, "after": [waiting.id], "train": {**GOOD["train"], "resume": f"{waiting.id}/1"}}
    assert api(owner).post("/api/v1/jobs", after, format="json").status_code == 201, "it is yet to save them"
