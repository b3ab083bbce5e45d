"""Calibrations: which number types and attention kernels they cover, and which they do not."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.calibration import Calibration, build_cluster
from planner.hardware.cluster import Cluster
from planner.hardware.profile import GemmPoint, LayerPoint
from tests.planner.hardware.reference_specs import build_calibration

SHAPE: dict[str, Any] = {"arch": "llama", "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
SHAPE |= {"ffn_hidden_size": 1536}
LAYER = {"ranks": 1, "tp": 1, "sequence_parallel": False, "micro_batch": 1, "seq_len": 512}
LAYER |= {"forward_s": 0.1, "backward_s": 0.2}
RATES = {"fp32": 1e11, "bf16": 1e12, "fp8": 4e10}
PRODUCT = {"ranks": 1, "m": 1024, "n": 1024, "k": 1024}


def build_spec(precision: str) -> JobSpec:
    model = {**SHAPE, "num_layers": 2, "vocab_size": 512, "max_seq_len": 512, "tied_embeddings": False}
    train = {"global_batch": 1, "seq_len": 512, "precision": precision}
    return parse_spec({"model": model, "train": train})


def build_points(**rates: float) -> tuple[GemmPoint, ...]:
    return tuple(
        GemmPoint.model_validate({**PRODUCT, "precision": kind, "seconds": 2 * 1024**3 / rate})
        for kind, rate in rates.items()
    )


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("fp32", "calibrated, ±31%"),
        ("bf16_state", "no bf16 calibration, within a factor of 10"),
        ("fp8", "no fp8 calibration, within a factor of 10"),
    ],
)
def test_uncalibrated_number_type_is_reported_as_not_measured(precision: str, words: str) -> None:
    """On a CPU, fp8 takes 9 to 28 times the time of bf16, so fp32's rate does not apply."""
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    profile = build_calibration().model_copy(update={"gemm": build_points(**RATES), "layers": (layer,)})
    told = estimate(build_spec(precision), build_cluster("here", profile))["time"]
    assert told["interval"]["words"] == words


def test_matmuls_use_the_rate_of_their_own_type() -> None:
    cluster = build_cluster("here", build_calibration().model_copy(update={"gemm": build_points(**RATES)}))
    compute = {kind: estimate(build_spec(kind), cluster)["time"]["parts"][0]["seconds"] for kind in ("fp8", "bf16")}
    assert compute["fp8"] > 5 * compute["bf16"]


def test_layer_time_does_not_depend_on_weight_storage() -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "bf16"})
    found = Calibration(build_calibration().model_copy(update={"layers": (layer,)}))
    assert {found.get_layer_seconds(build_spec(p), 1) for p in ("bf16", "bf16_gradients", "bf16_state")} == {
        (0.1, 0.2, 512)
    }
    assert found.get_layer_seconds(build_spec("fp8"), 1) is None


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 32},
        {"sliding_window": 64},
        {"mla": {"q_rank": 64, "kv_rank": 64, "nope_head_dim": 32, "rope_head_dim": 32, "value_head_dim": 64}},
    ],
)
def test_calibration_does_not_cover_another_attention(change: dict[str, Any]) -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "bf16"})
    found = Calibration(build_calibration().model_copy(update={"layers": (layer,)}))
    spec = build_spec("bf16").model_dump()
    assert found.get_layer_seconds(parse_spec({**spec, "model": {**spec["model"], "head_dim": 64}}), 1) == (
        0.1,
        0.2,
        512,
    )
    assert found.get_layer_seconds(parse_spec({**spec, "model": {**spec["model"], **change}}), 1) is None


def test_longer_or_unfused_sequences_scale_as_without_a_calibration() -> None:
    """Calibrated short sequences do not cover long ones, and the interval widens."""
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    cluster = build_cluster(
        "here", build_calibration().model_copy(update={"gemm": build_points(**RATES), "layers": (layer,)})
    )
    sheet = cluster.model_copy(update={"profile": None})

    def get_compute_seconds(where: Cluster, **train: Any) -> float:
        model = {**SHAPE, "num_layers": 64, "vocab_size": 512, "max_seq_len": 8192, "tied_embeddings": False}
        spec = parse_spec({"model": model, "train": {"global_batch": 1, "seq_len": 512, **train}})
        return estimate(spec, where)["time"]["parts"][0]["seconds"]

    assert get_compute_seconds(cluster) == pytest.approx(64 * 0.3, rel=0.1)
    for train in ({"seq_len": 8192}, {"seq_len": 8192, "attention": "unfused"}, {"attention": "unfused"}):
        assert get_compute_seconds(cluster, **train) / get_compute_seconds(cluster) == pytest.approx(
            get_compute_seconds(sheet, **train) / get_compute_seconds(sheet), rel=0.15
        )
    assert get_compute_seconds(cluster, seq_len=8192) > 1.5 * get_compute_seconds(cluster, global_batch=16)


@pytest.mark.parametrize(
    "change", [{"train": {"seq_len": 1024}}, {"train": {"attention": "unfused"}}, {"layout": {"cp": 2}}]
)
def test_uncalibrated_attention_has_a_wider_interval(change: dict[str, Any]) -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    cluster = build_cluster(
        "here", build_calibration().model_copy(update={"gemm": build_points(**RATES), "layers": (layer,)})
    )
    model = {**SHAPE, "num_layers": 2, "vocab_size": 512, "max_seq_len": 1024, "tied_embeddings": False}
    train = {"global_batch": 1, "seq_len": 512, **change.get("train", {})}
    told = estimate(parse_spec({"model": model, "layout": change.get("layout", {}), "train": train}), cluster)["time"]
    assert (
        told["interval"]["words"]
        == "calibrated with shorter sequences, one rank, and fused attention, within a factor of 3"
    )
