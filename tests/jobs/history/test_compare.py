"""Compare runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from contracts.telemetry.items import WARMUP_STEPS
from jobs.models import Attempt, Job
from jobs.runs.diagnosis.rank_reports import get_num_measured_steps
from jobs.runs.history.queries.comparison import compare_jobs
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.history.store import retention
from tests.jobs.diagnosis.items import ITEM, diagnosis, look
from tests.jobs.history.sample_telemetry import batch, cell, record_batches, step

Api = Callable[[User | None], APIClient]


def record(root: Path, late: int | None = None, link: bool = False, job: str = "job", tokens: int = 4096) -> None:
    """60 steps of 0.5 s on four ranks. In steps 30 to 39 rank `late` computes 0.2 s more, for which the others stand
    still in tp; or every rank's dp takes 0.3 s more."""
    busy, batches, time = 0.0, [], 0.0
    for number in range(1, 61):
        slow = 30 <= number < 40 and (late is not None or link)
        more = (0.3 if link else 0.2) if slow else 0.0
        time += 0.5 + more
        busy += 0.1 + (more if link else 0.0)
        items = []
        for rank in range(4):
            waits = more if late is not None and rank != late else 0.0
            exposed = {"dp": 0.1 + (more if link else 0.0), "tp": 0.05 + waits}
            parts = {"data": 0.01, "optimizer": 0.02, "exposed": exposed, "hidden": {"dp": 0.2}}
            cells = [{**cell(number), "busy_s": busy}]
            items.append(step(rank, number, time, *cells, parts=parts, step_s=0.5 + more, tokens=tokens))
        batches.append(batch(time, *items))
    record_batches(root, batches, job)


def test_compares_runs_by_step_time_and_tokens(
    attempt: Attempt, root: Path, owner: User, stranger: User, api: Api
) -> None:
    one = attempt.job
    spec = {**one.spec, "train": {**one.spec["train"], "learning_rate": 0.5}, "name": "other"}
    other = Job.objects.create(
        owner=owner, name="other", spec=spec, kind="train", num_slots=2, estimate=one.estimate, attempt=1
    )
    record(root, late=1, job=one.id)
    record(root, job=other.id, tokens=8192)
    client = api(owner)
    comparison = client.get(f"/api/v1/compare?jobs={one.id},{other.id}").json()
    assert [row["job"] for row in comparison["jobs"]] == [one.id, other.id]
    [difference] = comparison["differences"]
    assert difference["field"] == "train.learning_rate"
    assert difference["values"][1] == 0.5
    first, second = comparison["jobs"]
    assert first["curve"]["step"] == second["curve"]["step"] == list(range(1, 61))
    assert (first["curve"]["tokens"][-1], second["curve"]["tokens"][-1]) == (60 * 4096, 60 * 8192)
    assert first["curve"]["elapsed_s"][-1] == pytest.approx(32)
    assert (first["curve"]["grad_norm"], first["curve"]["learning_rate"]) == ([1.0] * 60, [0.001] * 60)
    assert second["curve"]["elapsed_s"][-1] == pytest.approx(30)
    assert first["traffic"] == [
        {"axis": "dp", "op": "all_reduce", "calls": 240, "payload_bytes": 240_000, "busy_s": pytest.approx(24)}
    ]
    assert second["parts"]["exposed"] == {"dp": 0.1, "tp": 0.05}
    assert first["plan"]["peak_memory_bytes"] > 0 < first["plan"]["time"]["step_s"]
    assert api(stranger).get(f"/api/v1/compare?jobs={one.id},{other.id}").status_code == 404
    for wrong in ("", one.id, f"{one.id},{one.id}", ",".join([one.id] * 7), f"{one.id},{other.id}&x=1"):
        status = 422 if wrong == f"{one.id},{one.id}" else 400
        assert client.get(f"/api/v1/compare?jobs={wrong}").status_code == status
    third = Job.objects.create(owner=owner, name="not kept", spec=spec, kind="train", num_slots=2, estimate={})
    comparison = client.get(f"/api/v1/compare?jobs={one.id},{third.id}").json()
    assert [row["recorded"] for row in comparison["jobs"]] == [True, False]


def test_step_time_is_that_of_the_slowest_rank(attempt: Attempt, root: Path, owner: User, api: Api) -> None:
    """Exported curves use the slowest rank, too."""
    took = {0: 1.0, 1: 2.0}
    record_batches(
        root,
        [batch(2.0, *(step(rank, 1, 2.0, step_s=seconds, tokens=100) for rank, seconds in took.items()))],
        attempt.job.id,
    )
    job = attempt.job
    other = Job.objects.create(
        owner=owner, name="other", spec=job.spec, kind="train", num_slots=2, estimate=job.estimate, attempt=1
    )
    comparison = api(owner).get(f"/api/v1/compare?jobs={attempt.job.id},{other.id}").json()
    curve = comparison["jobs"][0]["curve"]
    assert (curve["step_s"], curve["tokens_s"]) == ([2.0], [50.0])


def test_tokens_include_steps_before_the_checkpoint(attempt: Attempt, root: Path, owner: User) -> None:
    """A run resumed after step 60 has trained on 61 batches after its first step."""
    batches = [batch(n, step(0, 60 + n, float(n), ran=n, tokens=100)) for n in (1, 2, 3)]
    record_batches(root, batches, attempt.job.id)
    other = Job.objects.create(owner=owner, name="other", spec={}, kind="train", num_slots=2, estimate={}, attempt=1)
    curve = compare_jobs([attempt.job, other])["jobs"][0]["curve"]
    assert (curve["step"], curve["tokens"]) == ([61, 62, 63], [6100, 6200, 6300])


def test_merged_run_has_the_same_number_of_tokens(attempt: Attempt, root: Path) -> None:
    """Ranks reach a step at different times, so merging stopped at different steps per rank."""
    late = {0: 0.0, 1: 6.0}
    steps = [[step(rank, n, 10 * n + more, tokens=100) for rank, more in late.items()] for n in range(1, 1001)]
    recording = record_batches(root, [batch(10 * n, *items) for n, items in enumerate(steps, 1)], attempt.job_id)
    for _ in range(7):
        assert retention._merge(recording.folder, recording.manifest)
        curve = compare_jobs([attempt.job])["jobs"][0]["curve"]
        assert (curve["step"][-1], curve["tokens"][-1]) == (1000, 100_000)
        assert None not in curve["loss"]


@pytest.mark.parametrize("steps", [6, 300])
def test_step_parts_cover_the_steps_of_the_diagnosis(attempt: Attempt, root: Path, owner: User, steps: int) -> None:
    """The first steps are slow, and each later step is slightly slower than the previous step."""
    other = Job.objects.create(owner=owner, name="other", spec={}, kind="train", num_slots=2, estimate={}, attempt=1)
    diagnosed, batches = diagnosis({"dp": 2}), []
    for number in range(1, steps + 1):
        took = 9.0 if number <= 3 else 0.5 + number / 1000
        parts = [{"data": 0.1 * took, "optimizer": 0.02, "exposed": {"dp": 0.1 * took}, "hidden": {}}] * 2
        items = [step(rank, number, float(number), parts=part, step_s=took) for rank, part in enumerate(parts)]
        batches.append(batch(float(number), *items))
        for item in items:
            diagnosed.add(ITEM.validate_python(item), 0)
    for job in (attempt.job, other):
        record_batches(root, batches, job.id)
    measured = look(diagnosed)["measured"]
    assert measured is not None
    step_s, seconds = measured["step_s"], {part["name"]: part["seconds"] for part in measured["parts"]}
    compared = compare_jobs([attempt.job, other])["jobs"][0]["parts"]
    assert compared is not None
    assert compared["steps"] == min(get_num_measured_steps(2), steps - WARMUP_STEPS)
    scale = compared["step_s"] / step_s  # The step of a diagnosis is a median.
    assert (compared["data_s"], compared["exposed"]["dp"]) == pytest.approx(
        (scale * seconds["data"], scale * seconds["dp"])
    )
    by_rank = get_snapshot(attempt.job_id, 1)["parts"]
    assert by_rank["step_s"] == pytest.approx([compared["step_s"]] * 2)
    assert by_rank["exposed"] == [{"dp": pytest.approx(scale * seconds["dp"])}] * 2
