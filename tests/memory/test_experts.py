"""Layers of experts beside dry runs: of a capacity, or that no other rank holds."""

from __future__ import annotations

import pytest

from planner.facts.parse_spec import parse_spec
from tests.memory.compare import found
from tests.memory.test_memory import MODEL


@pytest.mark.parametrize(("num_experts", "ep"), [(4, 4), (8, 4), (4, 1)])
def test_what_comes_for_a_single_expert_lies_as_it_shall(num_experts: int, ep: int) -> None:
    """Rows from 4 ranks for one expert are not copied into another order, nor its answers, and what came back has no
    name beside its copy with a row of zeros: 7 of 68 MiB too much, and where a rank has two experts 2."""
    moe = {"num_experts": num_experts, "experts_per_token": 2, "expert_ffn_hidden_size": 128, "capacity_factor": 1.25}
    model = {**MODEL, "num_layers": 2, "hidden_size": 512, "num_heads": 8, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 1024, "precision": "bf16"}
    layout = {"dp": 4, "pp": 2, "ep": ep, "recompute": "full"}
    (first, _) = found(parse_spec({"model": model, "layout": layout, "train": train}))
    assert first.off == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "naive"])
def test_gradients_of_experts_that_no_other_rank_holds_are_added_up_one_by_one(schedule: str) -> None:
    """FSDP2 has no part in them, and they join their masters' as they come: what waits for the last micro-batch under
    ZeRO-1 was said to be theirs in bf16. 11 of 224 MiB were missing, of a whole backward 1 of 200 too much."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 512}
    model = {**MODEL, "num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192, "moe": moe}
    train = {"global_batch": 6, "micro_batches": 3, "seq_len": 256, "precision": "bf16"}
    layout = {"dp": 2, "pp": 2, "ep": 2, "zero": 2 if schedule == "naive" else 1, "schedule": schedule}
    (first, _) = found(parse_spec({"model": model, "layout": layout, "train": train}))
    assert first.off == pytest.approx(0.0, abs=0.003)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_is_gathered_by_itself_and_then_its_experts(stage: int) -> None:
    """Under ZeRO-3 they are units of their own. The trainer gathered a layer's experts while the layer after it was not
    through, 16 MiB more of 467; and the plan the layer with them, 8 more."""
    moe = {"num_experts": 8, "experts_per_token": 1, "expert_ffn_hidden_size": 1024}
    model = {**MODEL, "num_layers": 6, "num_kv_heads": 16, "vocab_size": 512, "moe": moe}
    train = {"global_batch": 8, "micro_batches": 2, "seq_len": 128, "precision": "bf16"}
    layout = {"dp": 4, "pp": 2, "ep": 2, "zero": 3, "schedule": "naive"}
    row = found(parse_spec({"model": model, "layout": layout, "train": train}))[stage]
    assert row.off == pytest.approx(0.0, abs=0.005)
