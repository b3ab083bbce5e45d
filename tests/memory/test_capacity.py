"""Layers whose experts take so many tokens and no more, beside dry runs."""

from __future__ import annotations

import pytest

from planner.facts.parse import parse_spec
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
