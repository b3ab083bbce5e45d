"""Resume from a checkpoint with the same or a different layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.folder import list_complete

TOLERANCE = 1e-5
ZERO3: dict[str, Any] = {"dp": 4, "zero": 3}
ODD = "vocabulary of 257"  # which ZeRO cuts into short shards, and tp pads


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "root"


@pytest.fixture(scope="module")
def first(root: Path) -> Ran:
    """Run six steps of ZeRO-3 on four ranks, and save after three."""
    return run(make_spec(ZERO3, variant=ODD, checkpoint_every=3), root)


def test_saves_and_reports_the_requested_steps(first: Ran, root: Path) -> None:
    names = [item["name"] for item in first.of_kind("checkpoint")]
    assert names == ["job/1/step-00000003", "job/1/step-00000006"]
    assert [c.get_name(root) for c in list_complete(root / "job")] == names
    for item in first.of_kind("checkpoint"):
        files = (root / item["name"]).iterdir()
        assert item["num_bytes"] == sum(f.stat().st_size for f in files if f.name != "manifest.json")
        assert item["save_s"] > 0


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "dp": 2, "zero": 1},
        pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp2 zbv x zero1 dp2", "tp2 x pp2"],
)
def test_the_loss_curve_continues(first: Ran, root: Path, layout: dict[str, Any]) -> None:
    again = run(make_spec(layout, variant=ODD, resume="job/1/step-00000003"), root, job="other")
    assert sorted(again.losses) == [4, 5, 6]
    for step, loss in again.losses.items():
        assert loss == pytest.approx(first.losses[step], rel=TOLERANCE)
    rows = [row for verdict in again.of_kind("verdict") for row in verdict["rows"]]
    assert rows
    assert all(row["measured_bytes"] == row["predicted_bytes"] for row in rows)
    assert all(row["measured_count"] == row["predicted_count"] for row in rows)


@pytest.mark.slow
def test_resumes_from_master_weights_in_bf16(root: Path) -> None:
    precision = {"precision": "bf16", "steps": 4}
    before = run(make_spec({}, checkpoint_every=3, **precision), root, job="bf16")
    again = run(make_spec({}, resume="bf16/1/step-00000003", **precision), root, job="bf16-again")
    assert again.losses == {4: before.losses[4]}, "weights rounded to bf16 would not give the very same loss"


def test_an_attempt_without_steps_left_succeeds(tmp_path: Path) -> None:
    """Succeed if the checkpoint already has all steps."""
    spec = make_spec({"dp": 2}, checkpoint_every=3, eval_every=4, verify="on")
    run(spec, tmp_path / "root")
    again = run(spec, tmp_path / "root", attempt=2)
    assert (again.problem, again.losses) == (None, {})
    (proof,) = again.of_kind("proof")
    assert proof["end"]["state"] == "equal"
    assert proof["one_process"]["why"] == "no steps left to train"
    verdicts = again.of_kind("verdict")
    assert len(verdicts) == 2
    assert all("peak_bytes" not in verdict for verdict in verdicts), "nothing was trained"
    rows = [row for verdict in verdicts for row in verdict["rows"]]
    assert all(row["measured_bytes"] == row["predicted_bytes"] for row in rows), rows


def test_a_new_attempt_resumes_from_the_newest_checkpoint_of_its_job(first: Ran, root: Path) -> None:
    longer = run(make_spec({"dp": 2}, variant=ODD, checkpoint_every=3, steps=7), root, attempt=2)
    assert sorted(longer.losses) == [7]
    assert (
        "resumed from step-00000006: 6 steps done, with a different layout (steps changed from 6 to 7)" in longer.output
    )


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        pytest.param("", {"dp": 4, "ep": 2, "zero": 2}, id="ep2", marks=pytest.mark.slow),
        pytest.param("three experts", {"dp": 4, "zero": 3}, id="fewer experts than shards"),
    ],
)
@pytest.mark.slow
def test_loads_experts_in_a_single_process(root: Path, variant: str, layout: dict[str, Any]) -> None:
    job = f"experts{len(variant)}"
    before = run(make_spec(layout, "moe", variant, checkpoint_every=3), root, job=job)
    again = run(make_spec({}, "moe", variant, resume=f"{job}/1/step-00000003"), root, job=f"{job}-alone")
    assert again.losses == pytest.approx({step: before.losses[step] for step in (4, 5, 6)}, rel=TOLERANCE)
