"""Compare layers of experts with dry runs: experts with a capacity, and experts without replicas."""

from __future__ import annotations

import pytest

from planner.facts.parse_spec import parse_spec
from tests.memory.compare import compare_stages
from tests.memory.test_memory import MODEL
from tests.support.tiers import extend_after


@pytest.mark.parametrize(("num_experts", "ep"), extend_after(1, [(8, 4), (4, 4), (4, 1)]))
def test_rows_for_a_single_expert_need_no_copy(num_experts: int, ep: int) -> None:
    """Check rows of 4 ranks for one expert, which need no copy in another order."""
    moe = {"num_experts": num_experts, "experts_per_token": 2, "expert_ffn_hidden_size": 128, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 2, "hidden_size": 512, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    layout = {"dp": 4, "pp": 2, "ep": ep, "recompute": "full"}
    (first, _) = compare_stages(parse_spec({"model": model, "layout": layout, "train": train}))
    assert first.error == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("schedule", extend_after(1, ["interleaved_zero_bubble", "naive"]))
def test_gradients_of_unreplicated_experts_are_added_one_by_one(schedule: str) -> None:
    """Check gradients outside FSDP2, which are added to their masters one by one."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192, "moe": moe}
    train = {"global_batch": 6, "micro_batches": 3, "seq_len": 256, "precision": "bf16"}
    layout = {"dp": 2, "pp": 2, "ep": 2, "zero": 2 if schedule == "naive" else 1, "schedule": schedule}
    (first, _) = compare_stages(parse_spec({"model": model, "layout": layout, "train": train}))
    assert first.error == pytest.approx(0.0, abs=0.003)


@pytest.mark.parametrize("stage", [0, 1])
def test_zero3_gathers_experts_after_their_layer(stage: int) -> None:
    """Check that ZeRO-3 gathers experts as separate units."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 1024}
    model = {**MODEL, "num_layers": 6, "num_kv_heads": 16, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    layout = {"dp": 4, "pp": 2, "ep": 2, "zero": 3, "schedule": "naive"}
    row = compare_stages(parse_spec({"model": model, "layout": layout, "train": train}))[stage]
    assert row.error == pytest.approx(0.0, abs=0.005)
