"""Software options of a spec change its predicted time and its interval."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.estimate import estimate
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.explain import explain
from planner.facts.model_parts import MoeSpec
from planner.facts.model_shapes import compute_model_flops, count_parameters
from planner.facts.presets import PRESETS
from planner.facts.resources import SoftwareSpec, StackName
from planner.facts.spec import JobSpec, Layout
from planner.hardware.calibration import build_cluster
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stack_options import (
    EAGER_SCORES,
    FP4_CASTS,
    GRAPHED,
    HOST_MARGINS,
    HOST_MARGINS_WITH_OPTIONS,
    MARGINS_WITH_OPTIONS,
    OVERLAPPED_EXPERTS,
    UNMEASURED_MARGIN,
    get_time_margin,
)
from planner.hardware.stacks import FUSED_NORMS, STACKS
from planner.search.layout_search import Constraints, search
from tests.planner.hardware.reference_specs import H100, SPEC, TRAIN, build_calibration, with_stack

MOE = MoeSpec(num_experts=64, experts_per_token=4, expert_ffn_hidden_size=1024)
SMALL = PRESETS["llama3-8b"].model.model_copy(update={"hidden_size": 1024, "ffn_hidden_size": 2048, "moe": MOE})
MIXED = SPEC.model_copy(
    update={
        "model": SMALL.model_copy(update={"num_heads": 16, "num_kv_heads": 4}),
        "layout": Layout(dp=32, ep=8, zero=1),
        "train": TRAIN.model_copy(update={"seq_len": 1024}),
    }
)


def _with_software(spec: JobSpec, stack: StackName = "megatron", **software: Any) -> JobSpec:
    resources = with_stack(stack, spec).resources.model_copy(update={"software": SoftwareSpec(**software)})
    return spec.model_copy(update={"resources": resources})


def _time_step(spec: JobSpec, cluster: str = "h100") -> Timing:
    return Timer(CLUSTERS[cluster]).get_step(spec)


def _time_with_constants(spec: JobSpec, stack: StackName = "megatron", **constants: Any) -> Timing:
    """Return the timing with explicit stack constants instead of software options."""
    stacks = {**STACKS, stack: STACKS[stack]._replace(**constants)}
    return Timer(H100, stacks).get_step(with_stack(stack, spec))


def test_empty_software_changes_no_time() -> None:
    assert _time_step(_with_software(MIXED)) == _time_step(with_stack("megatron", MIXED))


@pytest.mark.parametrize(
    ("software", "constants"),
    [
        *(({"cuda_graphs": name}, {"launch_s": GRAPHED[name] * 8e-5}) for name in ("router", "attention")),
        ({"cuda_graphs": "attention_and_router"}, {"launch_s": GRAPHED["attention_and_router"] * 8e-5}),
        ({"cuda_graphs": "whole"}, {"launch_s": 0.0, "expert_s": 0.0, "expert_cast_s": 0.0}),
        ({"deterministic": True}, {"launch_s": 1.45e-4, "expert_s": 1.6e-4}),
        ({"deterministic": True, "cuda_graphs": "attention"}, {"launch_s": 0.6 * 1.45e-4, "expert_s": 1.6e-4}),
        ({"dispatcher": "alltoall"}, {"dispatches_per_node": False, "sorts_dispatch": True}),
        ({"attention_kernel": "flash_2"}, {"attention": 1 / 1.6}),
    ],
)
def test_megatron_option_equals_its_constants(software: dict[str, Any], constants: dict[str, Any]) -> None:
    told, usual = _time_step(_with_software(MIXED, **software)), _time_step(with_stack("megatron", MIXED))
    assert told.step_s == pytest.approx(_time_with_constants(MIXED, **constants).step_s)
    assert told.step_s != pytest.approx(usual.step_s, rel=1e-4)


@pytest.mark.parametrize(
    ("attention", "software", "constants"),
    [
        ("unfused", {"attention_kernel": "eager"}, {"scores": EAGER_SCORES}),
        ("fused", {"attention_kernel": "flash_1"}, {"attention": 0.5}),
        ("fused", {"fused_norms": True}, {"norms": FUSED_NORMS}),
    ],
)
def test_scaling_option_equals_its_constants(
    attention: str, software: dict[str, Any], constants: dict[str, Any]
) -> None:
    spec = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"attention": attention})})
    told, usual = _time_step(_with_software(spec, "scaling", **software)), _time_step(with_stack("scaling", spec))
    assert told.step_s == pytest.approx(_time_with_constants(spec, "scaling", **constants).step_s)
    assert told.step_s != pytest.approx(usual.step_s, rel=1e-4)


def test_flash_attention_2_is_slower_than_cudnn_where_measured() -> None:
    """The difference was measured on Hopper. No measurement exists for Blackwell."""
    for cluster, slower in (("h100", True), ("gb200", False)):
        told, usual = (
            _time_step(_with_software(SPEC, attention_kernel=kernel), cluster) for kernel in ("flash_2", "own")
        )
        assert (told.step_s > usual.step_s) == slower


@pytest.mark.parametrize(
    ("ep", "graphs", "hides"), [(8, "none", False), (16, "none", True), (8, "whole", True), (8, "attention", False)]
)
def test_expert_traffic_overlaps_across_nodes_or_without_launches(ep: int, graphs: str, hides: bool) -> None:
    """The first of 4 micro-batches stays exposed."""
    spec = MIXED.model_copy(update={"layout": Layout(dp=32, ep=ep, zero=1)})
    shown, bare = (
        _time_step(_with_software(spec, overlap_experts=overlaps, cuda_graphs=graphs)).exposed_s["ep"]
        for overlaps in (True, False)
    )
    assert shown == pytest.approx((1 - OVERLAPPED_EXPERTS["ep"] * 3 / 4 * hides) * bare)


def test_tensor_collectives_stay_hidden_with_expert_overlap() -> None:
    spec = MIXED.model_copy(update={"layout": Layout(dp=32, tp=2, ep=16, zero=1)})
    told, usual = (_time_step(_with_software(spec, overlap_experts=overlaps)).exposed_s for overlaps in (True, False))
    assert told["ep"] < usual["ep"]
    assert told["tp"] == usual["tp"]


def test_fp4_has_its_own_rate_casts_more_and_hides_no_tensor_collective() -> None:
    """Utilization refers to the fp4 peak. An accelerator without fp4 multiplies in fp8, and the words report it."""
    train = TRAIN.model_copy(update={"precision": "fp8"})
    spec = SPEC.model_copy(update={"train": train})
    cluster = CLUSTERS["gb200"]
    chip = cluster.accelerator.model_copy(update={"fp8_flops": cluster.accelerator.fp4_flops})
    stack = STACKS["megatron"]
    known = {**STACKS, "megatron": stack._replace(casts=stack.casts * FP4_CASTS, overlap={})}
    expected = Timer(cluster.model_copy(update={"accelerator": chip}), known).get_step(with_stack("megatron", spec))
    told = _time_step(_with_software(spec, nvfp4=True), "gb200")
    assert told == expected
    assert told.step_s < _time_step(with_stack("megatron", spec), "gb200").step_s
    (mfu,) = [e for e in explain(_with_software(spec, nvfp4=True), cluster, stage=0) if e["figure"] == "MFU"]
    assert "10,000 TFLOP/s" in next(term["numbers"] for term in mfu["terms"] if term["name"] == "MFU")
    words = estimate(_with_software(spec, nvfp4=True), H100)["time"]["interval"]["words"]
    assert "NVFP4 matmuls, fp8 matmuls because H100 SXM lacks fp4" in words


def test_one_timer_separates_software_options() -> None:
    timer = Timer(H100)
    specs = [_with_software(MIXED, cuda_graphs=name) for name in ("none", "router", "whole", "none")]
    assert [timer.get_step(spec) for spec in specs] == [_time_step(spec) for spec in specs]


def test_calibrated_host_ignores_software_options() -> None:
    cluster = build_cluster("here", build_calibration())
    for software in ({"cuda_graphs": "whole"}, {"deterministic": True}, {"dispatcher": "alltoall"}):
        assert Timer(cluster).get_step(_with_software(MIXED, **software)) == Timer(cluster).get_step(
            with_stack("megatron", MIXED)
        )
    assert "graphs" not in estimate(_with_software(MIXED, cuda_graphs="whole"), cluster)["time"]["interval"]["words"]


def test_software_options_narrow_the_interval() -> None:
    for share, untold in ((0.0, STACKS["megatron"].time_margin), (0.05, HOST_MARGINS[1][1]), (0.5, HOST_MARGINS[0][1])):
        known = HOST_MARGINS_WITH_OPTIONS[0][1] if share > 0.2 else STACKS["megatron"].time_margin
        assert (
            get_time_margin("megatron", "H100", share),
            get_time_margin("megatron", "H100", share, has_options=True),
        ) == (untold, known)
    assert (
        get_time_margin("scaling", "A100", 0.0, has_options=True)
        == MARGINS_WITH_OPTIONS["scaling"]
        < get_time_margin("scaling", "A100", 0.0)
    )
    assert get_time_margin("scaling", "GB200", 0.0, has_options=True) == UNMEASURED_MARGIN, "it was not measured there"


def test_estimate_reports_its_software_options() -> None:
    told, untold = (
        estimate(spec, H100)["time"]
        for spec in (_with_software(MIXED, cuda_graphs="router"), with_stack("megatron", MIXED))
    )
    assert "Megatron with Transformer Engine, CUDA graphs of the router, " in told["interval"]["words"]
    assert told["interval"]["share"] < untold["interval"]["share"]
    assert "graphs" not in untold["interval"]["words"]


def test_search_uses_software_options() -> None:
    asked = Constraints(8, {"pp": 1, "cp": 1, "tp": 1}, max_micro_batch=1)
    best = [
        search(_with_software(MIXED, cuda_graphs=graphs), H100, asked, limit=1).best[0] for graphs in ("none", "whole")
    ]
    assert best[1].timing.step_s < 0.9 * best[0].timing.step_s
    assert best[1].spec.resources.software == SoftwareSpec(cuda_graphs="whole")


def test_wide_heads_and_expert_biases_add_parameters_and_window_reduces_flops() -> None:
    """Check 32 layers whose attention projections are twice as wide.

    Each expert has gate, up and down biases. In 16 layers, a token sees 256 of 1,024 tokens.
    """
    model, layers = MIXED.model, MIXED.model.num_layers
    wide = model.model_copy(update={"head_dim": 128})
    assert count_parameters(wide) - count_parameters(model) == layers * 1024 * 64 * (16 + 4 + 4 + 16)
    biased = model.model_copy(update={"moe": MOE.model_copy(update={"expert_bias": True})})
    assert count_parameters(biased) - count_parameters(model) == layers * 64 * (1024 + 1024 + 1024)
    seen = MIXED.model_copy(update={"model": model.model_copy(update={"sliding_window": 256})})
    tokens = MIXED.train.global_batch * 1024
    assert compute_model_flops(MIXED) - compute_model_flops(seen) == 3 * tokens * 4 * 1024 * 16 * (1024 - 256)
    long = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"sliding_window": 256})})
    assert _time_step(with_stack("megatron", long)).compute_s < _time_step(with_stack("megatron")).compute_s
