"""What a head loses to a vocabulary whose rows are not aligned is told, with the size that would spare it."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.timing import get_step_timing
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.catalog import CLUSTERS
from planner.report import format_estimate

H200 = CLUSTERS["h200"]


def spec_of(vocab_size: int, *, device: str = "cuda", **layout: Any) -> JobSpec:
    model = {"preset": "gpt2-xl", "num_heads": 20, "num_kv_heads": 20, "vocab_size": vocab_size}
    train = {"precision": "bf16", "global_batch": 32, "micro_batches": 4, "seq_len": 1024}
    return parse_spec({"model": model, "layout": layout, "train": train, "resources": {"device": device}})


@pytest.mark.parametrize(
    ("vocab_size", "tp", "larger"), [(50_257, 1, 50_304), (50_250, 1, 50_304), (50_258, 2, 50_432)]
)
def test_the_next_aligned_size_is_told_with_what_it_spares(vocab_size: int, tp: int, larger: int) -> None:
    spec = spec_of(vocab_size, tp=tp)
    made = estimate(spec, H200)
    told = made["aligned_vocabulary"]
    assert told["vocab_size"] == larger
    faster = get_step_timing(spec_of(larger, tp=tp), H200).step_s
    assert told["spares_s"] == pytest.approx(made["time"]["step_s"] - faster)
    assert f"vocabulary of {larger:,} tokens would save" in format_estimate(spec, made, [])


@pytest.mark.parametrize(("vocab_size", "tp"), [(50_304, 1), (50_256, 1), (50_257, 4), (50_257, 5)])
def test_nothing_is_told_of_rows_that_are_aligned_or_padded(vocab_size: int, tp: int) -> None:
    assert "aligned_vocabulary" not in estimate(spec_of(vocab_size, tp=tp), H200)


def test_nothing_is_told_of_a_cpu() -> None:
    assert "aligned_vocabulary" not in estimate(spec_of(50_257, device="cpu"))
