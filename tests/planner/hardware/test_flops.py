"""FLOPs that a stack executes, and the peak for utilization."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.timing import Timer
from planner.explain import explain
from planner.facts.model_shapes import compute_single_pass_flops
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.catalog import CLUSTERS
from planner.hardware.stacks import compute_hardware_flops


def build_spec(preset: str, stack: str, recompute: str, **train: Any) -> JobSpec:
    return parse_spec(
        {
            "model": {"preset": preset},
            "layout": {"recompute": recompute},
            "train": {"global_batch": 8, "micro_batches": 2, "seq_len": 1024, **train},
            "resources": {"stack": stack},
        }
    )


def count_recomputed_flops(preset: str, stack: str, recompute: str) -> int:
    spec = build_spec(preset, stack, recompute)
    return compute_hardware_flops(spec) - compute_single_pass_flops(spec)


def test_recompute_counts_every_second_matmul() -> None:
    """Compiled FSDP2 keeps the outputs of the query, value, gate and down projections."""
    model = build_spec("llama3-8b", "fsdp2", "selective").model
    kv = model.num_kv_heads * model.head_size
    layer = model.hidden_size * (kv + model.hidden_size + model.ffn_hidden_size)
    assert count_recomputed_flops("llama3-8b", "fsdp2", "selective") == 2 * 8 * 1024 * model.num_layers * layer
    assert count_recomputed_flops("llama3-8b", "ours", "selective") == 0


@pytest.mark.parametrize("stack", ["ours", "fsdp2_eager"])
def test_last_matmul_without_backward_use_counts_once(stack: str) -> None:
    model = build_spec("llama3-8b", stack, "full").model
    last = 2 * 8 * 1024 * model.num_layers * model.ffn_hidden_size * model.hidden_size
    assert (
        count_recomputed_flops("llama3-8b", stack, "full")
        == count_recomputed_flops("llama3-8b", "megatron", "full") - last
    )


def test_utilization_uses_the_reported_peak() -> None:
    """A CPU emulates fp8, so layers that stay in 16 bits are faster."""
    cpu = CLUSTERS["cpu"]
    spec = build_spec("llama-tiny", "ours", "none", precision="fp8", seq_len=128)
    assert (
        cpu.accelerator.get_peak_flops("fp8")
        < cpu.accelerator.get_peak_flops("bf16")
        == Timer(cpu).get_peak_flops(spec)
    )
    (told,) = [e for e in explain(spec, cpu, stage=0) if e["figure"] == "MFU"]
    (below,) = {term["numbers"] for term in told["terms"] if term["name"] in ("MFU", "HFU")}
    assert f" x {cpu.accelerator.bf16_flops / 1e12:.4g} TFLOP/s x " in below
