"""Resume in the same or a different layout, with tensors that equal the saved tensors bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.facts.parse_spec import parse_spec
from planner.facts.placements import TensorBox
from planner.facts.presets import PRESETS
from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.folder import MANIFEST, list_complete
from workers.checkpoint.load import _describe_changes, describe_model_difference
from workers.checkpoint.state import BLOCK, BoxedTensor, compute_box_checksum

TOLERANCE = 1e-5
ZERO3: dict[str, Any] = {"dp": 4, "zero": 3}
ODD = "vocabulary of 257"  # which ZeRO cuts into short shards, and tp pads
CHECKPOINT = "saved/1/step-00000002"
TRAIN: dict[str, Any] = {"variant": "vocabulary of 257", "steps": 5}  # tp pads it, and ZeRO cuts it into short shards
TINY = PRESETS["gpt-tiny"].model


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


def resumed(root: Path, layout: dict[str, Any], job: str) -> Ran:
    return run(make_spec(layout, resume=CHECKPOINT, **TRAIN), root, job=job)


@pytest.mark.slow
def test_loads_a_checkpoint_of_another_layout_and_matches_the_reference(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run(make_spec({"dp": 2, "zero": 3}, checkpoint_every=2, **{**TRAIN, "steps": 2}), root, job="saved")
    manifest = root / CHECKPOINT / MANIFEST
    content = json.loads(manifest.read_text())
    assert {name.partition(".")[0] for name in content["sums"]} == {"model", "exp_avg", "exp_avg_sq"}
    for number, layout in enumerate([{"tp": 2}, {"pp": 2, "virtual_stages": 2, "schedule": "zbv"}, {}]):
        again = resumed(root, layout, f"again-{number}")
        proof = again.of_kind("proof")[-1]
        assert again.problem is None, layout
        assert (proof["one_process"]["state"], proof["one_process"]["steps"], proof["wrong"]) == ("equal", 3, [])
    content["sums"]["exp_avg.embedding.weight"] += 1
    manifest.write_text(json.dumps(content))
    refused = resumed(root, {"tp": 2}, "wrong")
    assert refused.problem == (
        "`train.resume`: exp_avg.embedding.weight differs from checkpoint step-00000002 after loading."
    )


def test_explicit_and_derived_head_size_are_equal() -> None:
    messages = TINY.model_copy(update={"head_dim": TINY.head_size})
    assert describe_model_difference(messages, TINY) == describe_model_difference(TINY, messages) == ""
    wide = TINY.model_copy(update={"head_dim": 2 * TINY.head_size})
    assert describe_model_difference(wide, TINY) == (
        f"head_dim is {TINY.head_size} in the checkpoint and {2 * TINY.head_size} in the job"
    )


def test_reports_changed_settings_that_affect_the_loss() -> None:
    model = {"preset": "mixtral-tiny"}
    before = parse_spec({"model": model, "train": {"tokenizer": "bytes", "data": "a.txt"}})
    after = parse_spec(
        {
            "model": model,
            "train": {"data": "a.txt", "tokenizer": "other.json", "weight_decay": 0.2, "grad_clip": 0.5},
        }
    )
    routed = after.model.moe
    assert routed is not None
    after = after.model_copy(
        update={"model": after.model.model_copy(update={"moe": routed.model_copy(update={"balance_loss": 0.5})})}
    )
    result = _describe_changes(after, before, 3)
    for words in (
        "tokenizer changed from bytes to other.json",
        "weight_decay changed from 0.1 to 0.2",
        "grad_clip changed from 1.0 to 0.5",
    ):
        assert words in result
    assert "moe.balance_loss changed from 0.01 to 0.5" in result


@pytest.mark.parametrize(
    ("sampling", "batch", "result"),
    [
        ("epochs", 16, "data continues at sequence 100 x 16: 800 sequences of the epoch order skipped"),
        ("epochs", 4, "data continues at sequence 100 x 4: 400 sequences of the epoch order repeated"),
        ("epochs", 8, ""),
        ("random", 16, "(global_batch changed from 8 to 16)"),
    ],
)
def test_reports_skipped_and_repeated_sequences_of_an_epoch(sampling: str, batch: int, result: str) -> None:
    before, after = (
        parse_spec({"model": {"preset": "gpt-tiny"}, "train": {"sampling": sampling, "global_batch": size}})
        for size in (8, batch)
    )
    assert result in _describe_changes(after, before, 100)
    assert bool(result) == bool(_describe_changes(after, before, 100))


def part(whole: torch.Tensor, *spans: tuple[int, int]) -> BoxedTensor:
    """Return the part of a tensor in [start, end) of each dim."""
    box = TensorBox(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))
    return BoxedTensor(whole[box.slices], box, tuple(whole.shape))


def same(a: int, b: int) -> bool:
    return (a - b) % 2**64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_of_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    total = compute_box_checksum(part(whole, (0, 6), (0, 10)))
    assert same(sum(compute_box_checksum(part(whole, span, (0, 10))) for span in ((0, 1), (1, 6))), total)
    assert same(sum(compute_box_checksum(part(whole, (0, 6), span)) for span in ((0, 7), (7, 10))), total)
    stacked = torch.randn(3, 4, 5)
    parts = [part(stacked, (0, 3), (0, 4), span) for span in ((0, 2), (2, 5))]
    assert same(sum(map(compute_box_checksum, parts)), compute_box_checksum(part(stacked, (0, 3), (0, 4), (0, 5))))


def test_sums_long_tensors_in_blocks() -> None:
    whole = torch.randn(BLOCK + 3)
    total = compute_box_checksum(part(whole, (0, len(whole))))
    assert same(sum(compute_box_checksum(part(whole, span)) for span in ((0, 5), (5, len(whole)))), total)


def test_detects_changed_and_moved_elements() -> None:
    whole = torch.randn(4, 5)
    before = compute_box_checksum(part(whole, (0, 4), (0, 5)))
    for place in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1)[place] += 1e-3
        assert compute_box_checksum(part(changed, (0, 4), (0, 5))) != before
    for moved in (whole[[1, 0, 2, 3]], whole[:, [0, 2, 1, 3, 4]], torch.zeros_like(whole)):
        assert compute_box_checksum(part(moved.contiguous(), (0, 4), (0, 5))) != before
    square = torch.randn(5, 5)
    assert compute_box_checksum(part(square, (0, 5), (0, 5))) != compute_box_checksum(
        part(square.T.contiguous(), (0, 5), (0, 5))
    )
