"""Check that predicted and measured traffic match for padded shards, several buckets, bf16, and no clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planner.cost.traffic import get_step_traffic
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from tests.parity.cases import SIZES
from tests.parity.compare import Run, gradient_difference, run_specs, wrong_memory

UNEVEN_BY_DP4 = {**SIZES["gpt"], "hidden_size": 30, "ffn_hidden_size": 50, "num_heads": 3, "num_kv_heads": 3}
UNEVEN_BY_DP2_TP2 = {**SIZES["gpt"], "hidden_size": 36, "ffn_hidden_size": 50}
OVER_25_MIB = {**SIZES["gpt"], "hidden_size": 576, "ffn_hidden_size": 2304}


def spec(model: dict[str, Any], layout: dict[str, Any], **train: Any) -> JobSpec:
    settings = {"steps": 2, "global_batch": 8, "micro_batches": 2, "seq_len": 32, "eval_every": 2, "warmup_steps": 1}
    return parse_spec({"model": model, "layout": layout, "train": {**settings, **train}})


SPECS = {
    "shards that dp pads": spec(UNEVEN_BY_DP4, {"dp": 4, "zero": 1}),
    "shards that dp pads after tp": spec(UNEVEN_BY_DP2_TP2, {"dp": 2, "tp": 2, "zero": 3, "sequence_parallel": True}),
    "gradients over several buckets": spec(OVER_25_MIB, {"dp": 2, "pp": 2}, eval_every=0, steps=1),
    "bf16, ZeRO-1 through a pipeline": spec(SIZES["gpt"], {"pp": 2, "dp": 2, "zero": 1}, precision="bf16"),
    "bf16, ZeRO-3 with tp": spec(SIZES["llama"], {"dp": 2, "tp": 2, "zero": 3}, precision="bf16"),
    "bf16, replicas and tp with sp": spec(
        SIZES["llama"], {"dp": 2, "tp": 2, "sequence_parallel": True}, precision="bf16"
    ),
    "bf16, weight gradients later": spec(
        SIZES["llama"], {"pp": 2, "dp": 2, "schedule": "zbv", "virtual_stages": 2}, precision="bf16", micro_batches=4
    ),
    "bf16 gradients, table tied over the pipe": spec(
        SIZES["gpt"], {"pp": 2, "dp": 2}, precision="bf16_gradients", global_batch=8
    ),
    "bf16 gradients, ZeRO-2 and tp with sp": spec(
        SIZES["llama"], {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True}, precision="bf16_gradients"
    ),
    "bf16 gradients, replicas and tp with sp": spec(
        SIZES["llama"], {"dp": 2, "tp": 2, "sequence_parallel": True}, precision="bf16_gradients"
    ),
    "fp8, replicas and tp with sp": spec(
        SIZES["llama"], {"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"}, precision="fp8"
    ),
    "fp8, ZeRO-3 and cp": spec(SIZES["llama"], {"dp": 2, "cp": 2, "zero": 3}, precision="fp8"),
    "fp8, weight gradients later": spec(
        SIZES["llama"],
        {"pp": 2, "dp": 2, "schedule": "zbv", "virtual_stages": 2},
        precision="fp8_gradients",
        micro_batches=4,
    ),
    "all in bf16, ZeRO-1 through a pipeline": spec(SIZES["gpt"], {"pp": 2, "dp": 2, "zero": 1}, precision="bf16_state"),
    "all in bf16, replicas and tp": spec(SIZES["llama"], {"dp": 2, "tp": 2}, precision="bf16_state"),
    "half gradients, experts that no other rank holds": spec(
        SIZES["moe"], {"pp": 2, "dp": 2, "ep": 2, "zero": 2}, precision="bf16_gradients", eval_every=0
    ),
    "16 bits, inputs gathered again but those of experts": spec(
        {**SIZES["moe"], "num_layers": 2},
        {"tp": 2, "sequence_parallel": True, "regather": True},
        precision="bf16",
        steps=1,
    ),
    "no clipping, no validation": spec(
        SIZES["llama"], {"pp": 2, "tp": 2, "schedule": "gpipe"}, grad_clip=0.0, eval_every=0, micro_batches=1
    ),
    "the batch of the single-process reference in bf16": spec(SIZES["llama"], {}, precision="bf16"),
    "the batch of the single-process reference": spec(SIZES["llama"], {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return run_specs(SPECS, tmp_path_factory.mktemp("fidelity"))


@pytest.mark.parametrize("name", [name for name, s in SPECS.items() if s.layout.world_size > 1])
def test_each_rank_sends_the_predicted_bytes(runs: dict[str, Run], name: str) -> None:
    rows = [row for items in runs[name].items for item in items if item["kind"] == "verdict" for row in item["rows"]]
    assert {row["phase"] for row in rows} >= {"setup", "step"}
    assert [row for row in rows if row["measured_bytes"] != row["predicted_bytes"]] == []
    assert [row for row in rows if row["measured_count"] != row["predicted_count"]] == []
    assert all(map(math.isfinite, runs[name].losses))


@pytest.mark.parametrize("name", list(SPECS))
def test_each_stage_has_the_planned_state_bytes(runs: dict[str, Run], name: str) -> None:
    assert wrong_memory(SPECS[name], runs[name].items) == 0


def test_uses_several_buckets() -> None:
    for rank in range(4):
        over_dp = [c for c in get_step_traffic(SPECS["gradients over several buckets"], rank) if c.axis == "dp"]
        assert [(c.op, c.count) for c in over_dp] == [("all_reduce", 2)]


@pytest.mark.parametrize("name", [name for name, s in SPECS.items() if s.train.precision != "fp32"])
def test_16_bit_layouts_match_a_reference_in_their_precision(runs: dict[str, Run], name: str) -> None:
    *_, proof = (item for item in runs[name].items[0] if item["kind"] == "proof")
    assert proof["one_process"]["state"] == "equal"
    assert proof["one_process"]["gradient"] < 0.1


@pytest.mark.parametrize("name", [name for name, s in SPECS.items() if "bf16" in name and s.model.arch == "llama"])
def test_bf16_training_matches_fp32_within_its_precision(runs: dict[str, Run], name: str) -> None:
    whole, half = runs["the batch of the single-process reference"], runs[name]
    assert half.losses == pytest.approx(whole.losses, rel=5e-4)
    assert half.losses != whole.losses
    assert half.norms == pytest.approx(whole.norms, rel=1e-2)
    gradients = {key: gradient.float() for key, gradient in half.gradients.items()}
    assert gradient_difference(gradients, whole.gradients) < 0.02
