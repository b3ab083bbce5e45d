"""What a calibration says of types of numbers that it timed layers in, and of those that it did not."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.calibration import Calibration, build_cluster
from planner.hardware.cluster import Cluster
from planner.hardware.profile import GemmPoint, LayerPoint
from tests.planner.hardware.stacked import measured

SHAPE: dict[str, Any] = {"arch": "llama", "hidden_size": 512, "num_heads": 8, "num_kv_heads": 8}
SHAPE |= {"ffn_hidden_size": 1536}
LAYER = {"ranks": 1, "tp": 1, "sequence_parallel": False, "micro_batch": 1, "seq_len": 512}
LAYER |= {"forward_s": 0.1, "backward_s": 0.2}
RATES = {"fp32": 1e11, "bf16": 1e12, "fp8": 4e10}
PRODUCT = {"ranks": 1, "m": 1024, "n": 1024, "k": 1024}


def asked(precision: str) -> JobSpec:
    model = {**SHAPE, "num_layers": 2, "vocab_size": 512, "max_seq_len": 512, "tied_embeddings": False}
    train = {"global_batch": 1, "seq_len": 512, "precision": precision}
    return parse_spec({"model": model, "train": train})


def points(**rates: float) -> tuple[GemmPoint, ...]:
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
def test_a_type_that_no_layer_was_timed_in_is_not_told_as_calibrated(precision: str, words: str) -> None:
    """fp8 on a CPU was planned by fp32's rate, told ±31%, and took 9 to 28 times what bf16 takes."""
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    profile = measured().model_copy(update={"gemm": points(**RATES), "layers": (layer,)})
    told = estimate(asked(precision), build_cluster("here", profile))["time"]
    assert told["interval"]["words"] == words


def test_products_run_at_the_rate_of_their_own_type() -> None:
    cluster = build_cluster("here", measured().model_copy(update={"gemm": points(**RATES)}))
    compute = {kind: estimate(asked(kind), cluster)["time"]["parts"][0]["seconds"] for kind in ("fp8", "bf16")}
    assert compute["fp8"] > 5 * compute["bf16"]


def test_a_layer_is_the_same_whatever_holds_its_weights_between_steps() -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "bf16"})
    found = Calibration(measured().model_copy(update={"layers": (layer,)}))
    assert {found.get_layer_seconds(asked(p), 1) for p in ("bf16", "bf16_gradients", "bf16_state")} == {(0.1, 0.2, 512)}
    assert found.get_layer_seconds(asked("fp8"), 1) is None


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 32},
        {"sliding_window": 64},
        {"mla": {"q_rank": 64, "kv_rank": 64, "nope_head_dim": 32, "rope_head_dim": 32, "value_head_dim": 64}},
    ],
)
def test_a_layer_of_another_attention_was_not_measured(change: dict[str, Any]) -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "bf16"})
    found = Calibration(measured().model_copy(update={"layers": (layer,)}))
    spec = asked("bf16").model_dump()
    assert found.get_layer_seconds(parse_spec({**spec, "model": {**spec["model"], "head_dim": 64}}), 1) == (
        0.1,
        0.2,
        512,
    )
    assert found.get_layer_seconds(parse_spec({**spec, "model": {**spec["model"], **change}}), 1) is None


def test_a_layer_of_longer_or_unfused_sequences_takes_as_much_more_as_without_a_calibration() -> None:
    """It was told as of sequences as short as those measured: up to 17 times too fast, and as sure."""
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    cluster = build_cluster("here", measured().model_copy(update={"gemm": points(**RATES), "layers": (layer,)}))
    sheet = cluster.model_copy(update={"profile": None})

    def of(where: Cluster, **train: Any) -> float:
        model = {**SHAPE, "num_layers": 64, "vocab_size": 512, "max_seq_len": 8192, "tied_embeddings": False}
        spec = parse_spec({"model": model, "train": {"global_batch": 1, "seq_len": 512, **train}})
        return estimate(spec, where)["time"]["parts"][0]["seconds"]

    assert of(cluster) == pytest.approx(64 * 0.3, rel=0.1)
    for asked in ({"seq_len": 8192}, {"seq_len": 8192, "attention": "unfused"}, {"attention": "unfused"}):
        assert of(cluster, **asked) / of(cluster) == pytest.approx(of(sheet, **asked) / of(sheet), rel=0.15)
    assert of(cluster, seq_len=8192) > 1.5 * of(cluster, global_batch=16)


@pytest.mark.parametrize(
    "change", [{"train": {"seq_len": 1024}}, {"train": {"attention": "unfused"}}, {"layout": {"cp": 2}}]
)
def test_what_attention_was_not_timed_in_is_not_as_sure(change: dict[str, Any]) -> None:
    layer = LayerPoint.model_validate({**LAYER, **SHAPE, "precision": "fp32"})
    cluster = build_cluster("here", measured().model_copy(update={"gemm": points(**RATES), "layers": (layer,)}))
    model = {**SHAPE, "num_layers": 2, "vocab_size": 512, "max_seq_len": 1024, "tied_embeddings": False}
    train = {"global_batch": 1, "seq_len": 512, **change.get("train", {})}
    told = estimate(parse_spec({"model": model, "layout": change.get("layout", {}), "train": train}), cluster)["time"]
    assert (
        told["interval"]["words"]
        == "calibrated with shorter sequences, one rank, and fused attention, within a factor of 3"
    )
