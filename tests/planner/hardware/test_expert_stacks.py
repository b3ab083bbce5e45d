"""Training stacks with mixtures of experts."""

from __future__ import annotations

import pytest

from planner.cost.compute import ComputeTimer
from planner.cost.resolved_plan import resolve
from planner.cost.timing import Timer, get_step_timing
from planner.facts.model_parts import MoeSpec
from planner.facts.spec import JobSpec, Layout
from planner.hardware.cluster import NodeSpan
from planner.hardware.kernel_time import compute_collective_seconds
from planner.hardware.kernels import Gemm, MemoryKernel, ModuleKernels, build_layer_kernels
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import STACKS
from tests.planner.hardware.reference_specs import H100, SPEC, TRAIN, with_stack

MIXED = SPEC.model_copy(
    update={
        "model": SPEC.model.model_copy(
            update={"moe": MoeSpec(num_experts=16, experts_per_token=2, expert_ffn_hidden_size=4096)}
        ),
        "layout": Layout(dp=32, tp=2, ep=4, sequence_parallel=True),
    }
)


def _count_matmuls(**kinds: bool) -> list[Gemm]:
    return [k for k in build_layer_kernels(MIXED, moe=True, **kinds).forward if isinstance(k, Gemm) and not k.wide]


def test_joined_matmuls_compute_equal_flops() -> None:
    """Count q, k, v, o, two up projections, and one down projection."""
    usual, joined = _count_matmuls(), _count_matmuls(fused_projections=True)
    assert (len(usual), len(joined)) == (7, 4)
    assert sum(g.flops for g in joined) == sum(g.flops for g in usual)
    assert {g.batch for g in usual} == {1, 4}


def _count_extra_bytes(spec: JobSpec = MIXED, **kinds: bool) -> list[int]:
    """Return the bytes that memory-bound kernels move beyond those of a usual layer with experts."""

    def moved(work: ModuleKernels) -> list[int]:
        return [
            sum(k.num_bytes for k in part if isinstance(k, MemoryKernel))
            for part in (work.forward, work.backward_input)
        ]

    usual, changed = build_layer_kernels(MIXED, moe=True), build_layer_kernels(spec, moe=True, **kinds)
    return [b - a for a, b in zip(moved(usual), moved(changed), strict=True)]


def test_all_to_all_permutes_tokens_by_expert_and_back() -> None:
    """Each token has two copies of 4,096 elements of 2 bytes, read and written twice in each half."""
    tokens = MIXED.micro_batch_size * TRAIN.seq_len
    assert _count_extra_bytes(sorts_tokens=True) == [2 * 2 * 2 * tokens * 4096 * 2] * 2
    one = MIXED.model_copy(update={"layout": Layout(dp=32, tp=2, ep=16, sequence_parallel=True)})
    assert build_layer_kernels(one, moe=True, sorts_tokens=True) == build_layer_kernels(one, moe=True), (
        "one expert a rank has one order"
    )


def test_clamp_before_the_gate_reads_and_writes_both_inputs() -> None:
    """A tensor rank has 2,048 of an expert. Gate and up are clamped and joined, and the backward masks both."""
    inner = MIXED.micro_batch_size * TRAIN.seq_len * 2 * 4096 // 2
    assert MIXED.model.moe is not None
    moe = MIXED.model.moe.model_copy(update={"swiglu_limit": 7.0})
    clamped = MIXED.model_copy(update={"model": MIXED.model.model_copy(update={"moe": moe})})
    assert _count_extra_bytes(clamped) == [16 * inner, 20 * inner]


def _measure_launch_wait(**changed: float) -> float:
    stacks = {**STACKS, "megatron": STACKS["megatron"]._replace(**changed)}
    return Timer(H100, stacks).get_step(with_stack("megatron", MIXED)).launch_s


def test_device_waits_for_host_work_after_a_router_but_not_for_casts() -> None:
    layers, m = 32, 4
    assert _measure_launch_wait(syncs_experts=False, expert_s=0.0) == 0.0, "hidden behind products of 8,192 tokens"
    forward = build_layer_kernels(MIXED, moe=True, fused_projections=True, copies_queries=True).forward
    own = STACKS["megatron"].launch_s * len(forward) * layers * m
    assert _measure_launch_wait(expert_s=0.0) == pytest.approx(own)
    assert _measure_launch_wait() - _measure_launch_wait(expert_s=0.0) == pytest.approx(
        2 * 4 * STACKS["megatron"].expert_s * layers * m
    )
    fp8 = MIXED.model_copy(update={"train": TRAIN.model_copy(update={"precision": "fp8"})})
    casts = 2 * 4 * STACKS["megatron"].expert_cast_s * layers * m
    assert get_step_timing(with_stack("megatron", fp8), H100).launch_s == pytest.approx(
        _measure_launch_wait() + casts
    ), "an expert's own"


def _measure_tensor_waits(**changed: object) -> float:
    stacks = {**STACKS, "megatron": STACKS["megatron"]._replace(**changed)}
    return Timer(H100, stacks).get_step(with_stack("megatron", MIXED)).exposed_s["tp"]


@pytest.mark.parametrize("ep", [4, 16])
def test_host_time_counts_each_expert_of_a_rank(ep: int) -> None:
    """Two matmuls run in forward, and none overlaps after a router."""
    spec = with_stack(
        "megatron", MIXED.model_copy(update={"layout": Layout(dp=32, tp=2, ep=ep, sequence_parallel=True)})
    )
    stack = STACKS["megatron"]
    slower = stack._replace(expert_s=stack.expert_s + 1e-3)
    launch = [
        ComputeTimer(H100.accelerator, Stacks({"megatron": s}, 8), None).time_stage(resolve(spec), 0, 8).launch_s
        for s in (stack, slower)
    ]
    experts = 16 // ep * spec.model.num_layers
    assert launch[1] - launch[0] >= 2 * experts * 1e-3 - 1e-9


def test_tensor_gathers_for_experts_stay_exposed_and_replace_mlp_sums() -> None:
    layers, m, tokens = 32, 4, MIXED.micro_batch_size * TRAIN.seq_len

    def each(rows: int) -> float:
        ops = ("all_gather", "reduce_scatter")
        return sum(2 * compute_collective_seconds(op, rows * 4096 * 2, NodeSpan(2, 1), H100) for op in ops)

    gathered, sums = each(2 * tokens), each(tokens)
    for hidden, instead in ((1.0, 0.0), (0.0, sums)):
        kinds: tuple[dict[str, object], ...] = ({}, {"shards_dispatch": False})
        sharded, usual = (_measure_tensor_waits(overlap={"tp": hidden}, **kind) for kind in kinds)
        assert sharded - usual == pytest.approx(m * layers * (gathered - instead))
