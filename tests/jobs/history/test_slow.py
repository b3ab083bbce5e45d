"""Dragged over slow steps: what differs is named, with how much; and runs stand side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from jobs.history.slow import slow_steps
from jobs.models import Attempt, Job
from planner.facts.spec import SpecError
from tests.jobs.history.told import BEGAN, batch, cell, keep, step

Api = Callable[[User | None], APIClient]
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


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
    keep(root, batches, job)


def dragged() -> Any:
    """Over steps 30 to 39 of `record`, which end from 14.5 s on."""
    return slow_steps("job", 1, BEGAN + 14.6, BEGAN + 21.6, HOSTS)


def test_a_rank_that_computed_longer_is_named_with_its_host_and_the_axis_that_waited(root: Path) -> None:
    record(root, late=2)
    told = dragged()
    assert (told["steps_in"], told["steps_beside"]) == (10, 47)
    assert told["step"] == {"name": "step", "in_s": 0.7, "beside_s": 0.5, "more_s": 0.2}
    assert (told["ranks"][0]["rank"], told["ranks"][0]["host"]) == (2, "b")
    assert told["ranks"][0]["more_s"] == pytest.approx(0.2)
    assert [one["more_s"] for one in told["ranks"][1:]] == pytest.approx([0, 0, 0], abs=1e-6)
    assert told["hosts"][0]["name"] == "b"
    assert told["hosts"][0]["more_s"] == pytest.approx(0.1)
    assert told["parts"][0]["name"] == "tp"
    assert told["parts"][0]["more_s"] == pytest.approx(0.15), "three of four ranks wait"
    assert sum(part["more_s"] for part in told["parts"]) == pytest.approx(told["step"]["more_s"], abs=1e-6)


def test_a_link_that_slowed_is_its_axis_and_collective_and_no_rank(root: Path) -> None:
    record(root, link=True)
    told = slow_steps("job", 1, BEGAN + 14.6, BEGAN + 22.6, HOSTS)
    assert told["parts"][0]["name"] == "dp"
    assert told["parts"][0]["more_s"] == pytest.approx(0.3)
    first = told["collectives"][0]
    assert (first["axis"], first["op"]) == ("dp", "all_reduce")
    assert first["more_s"] == pytest.approx(0.3, rel=0.15), "counters are by second"
    assert [one["more_s"] for one in told["ranks"]] == pytest.approx([0, 0, 0, 0], abs=1e-6)


def test_a_range_without_steps_is_refused_with_how_many_there_are(root: Path) -> None:
    record(root)
    with pytest.raises(SpecError, match="0 steps ended in it and 57 beside it"):
        slow_steps("job", 1, BEGAN + 1000, BEGAN + 2000, HOSTS)
    with pytest.raises(SpecError, match="57 steps ended in it and 0 beside it"):
        slow_steps("job", 1, BEGAN, BEGAN + 2000, HOSTS)


def test_runs_are_compared_by_step_time_and_tokens(
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
    told = client.get(f"/api/v1/compare?jobs={one.id},{other.id}").json()
    assert [row["job"] for row in told["jobs"]] == [one.id, other.id]
    [difference] = told["differences"]
    assert difference["field"] == "train.learning_rate"
    assert difference["values"][1] == 0.5
    first, second = told["jobs"]
    assert first["curve"]["step"] == second["curve"]["step"] == list(range(1, 61))
    assert (first["curve"]["tokens"][-1], second["curve"]["tokens"][-1]) == (60 * 4096, 60 * 8192)
    assert first["curve"]["elapsed_s"][-1] == pytest.approx(32)
    assert second["curve"]["elapsed_s"][-1] == pytest.approx(30)
    assert first["traffic"] == [
        {"axis": "dp", "op": "all_reduce", "calls": 240, "payload_bytes": 240_000, "busy_s": pytest.approx(24)}
    ]
    assert second["parts"]["exposed"] == {"dp": 0.1, "tp": 0.05}
    assert first["plan"]
    assert api(stranger).get(f"/api/v1/compare?jobs={one.id},{other.id}").status_code == 404
    for wrong in ("", one.id, f"{one.id},{one.id}", ",".join([one.id] * 7), f"{one.id},{other.id}&x=1"):
        assert client.get(f"/api/v1/compare?jobs={wrong}").status_code == 400
    third = Job.objects.create(owner=owner, name="not kept", spec=spec, kind="train", num_slots=2, estimate={})
    told = client.get(f"/api/v1/compare?jobs={one.id},{third.id}").json()
    assert [row["recorded"] for row in told["jobs"]] == [True, False]
