"""Loaded tensors equal saved tensors bit by bit, and the reference resumes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers.checkpoint.runs import Ran, make_spec, run
from workers.checkpoint.folder import MANIFEST

CHECKPOINT = "saved/1/step-00000002"
TRAIN: dict[str, Any] = {"variant": "vocabulary of 257", "steps": 5}  # tp pads it, and ZeRO cuts it into short shards


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
