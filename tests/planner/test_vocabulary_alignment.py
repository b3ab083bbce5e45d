"""Alignment of the vocabulary: report the head's lost time and the size that avoids it."""

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


def build_spec(vocab_size: int, *, device: str = "cuda", **layout: Any) -> JobSpec:
    model = {"preset": "gpt2-xl", "num_heads": 20, "num_kv_heads": 20, "vocab_size": vocab_size}
    train = {"precision": "bf16", "global_batch": 32, "micro_batches": 4, "seq_len": 1024}
    return parse_spec({"model": model, "layout": layout, "train": train, "resources": {"device": device}})


@pytest.mark.parametrize(
    ("vocab_size", "tp", "larger"), [(50_257, 1, 50_304), (50_250, 1, 50_304), (50_258, 2, 50_432)]
)
def test_reports_the_next_aligned_size_and_its_saving(vocab_size: int, tp: int, larger: int) -> None:
    spec = build_spec(vocab_size, tp=tp)
    made = estimate(spec, H200)
    told = made["aligned_vocabulary"]
    assert told["vocab_size"] == larger
    faster = get_step_timing(build_spec(larger, tp=tp), H200).step_s
    assert told["spares_s"] == pytest.approx(made["time"]["step_s"] - faster)
    assert f"vocabulary of {larger:,} tokens would save" in format_estimate(spec, made, [])


@pytest.mark.parametrize(("vocab_size", "tp"), [(50_304, 1), (50_256, 1), (50_257, 4), (50_257, 5)])
def test_aligned_or_padded_rows_have_no_report(vocab_size: int, tp: int) -> None:
    assert "aligned_vocabulary" not in estimate(build_spec(vocab_size, tp=tp), H200)


def test_cpu_has_no_report() -> None:
    assert "aligned_vocabulary" not in estimate(build_spec(50_257, device="cpu"))
