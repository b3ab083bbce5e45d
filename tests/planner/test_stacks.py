"""What software makes of the same kernels and links, and what of a step follows the cluster planned for."""

from __future__ import annotations

from typing import get_args

import pytest

from planner.cost.estimate import estimate
from planner.cost.timing import Timer, step_time
from planner.facts.presets import PRESETS
from planner.facts.runnable import not_runnable
from planner.facts.spec import JobSpec, Layout, MoeSpec, Resources, StackName, TrainSpec
from planner.hardware.calibration import cluster_of
from planner.hardware.cluster import gemm_seconds
from planner.hardware.clusters import CLUSTERS
from planner.hardware.kernels import Gemm, Pass, layer_work
from planner.hardware.profile import CollectivePoint, GemmPoint, HostProfile, StreamPoint
from planner.hardware.runs import Run, stripped
from planner.hardware.stacks import STACKS

H100 = CLUSTERS["h100"]
TRAIN = TrainSpec(global_batch=256, micro_batches=4, seq_len=4096, precision="bf16")
SPEC = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=32, tp=2, zero=1, sequence_parallel=True),
    train=TRAIN,
    resources=Resources(device="cuda"),
)


def on(stack: StackName, spec: JobSpec = SPEC) -> JobSpec:
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"stack": stack})})


def test_every_stack_that_a_spec_can_name_has_constants() -> None:
    assert set(STACKS) == set(get_args(StackName))
    times = {stack: step_time(on(stack), H100).step_s for stack in STACKS}
    assert len(set(times.values())) == len(STACKS)


def test_one_timer_keeps_stacks_apart() -> None:
    timer = Timer(H100)
    assert [timer.step(on(s)).step_s for s in STACKS] == [step_time(on(s), H100).step_s for s in STACKS]


def test_overlap_follows_the_cluster_and_not_where_the_job_would_run() -> None:
    on_cpu = SPEC.model_copy(update={"resources": Resources(device="cpu")})
    assert step_time(on_cpu, H100).step_s == step_time(SPEC, H100).step_s


def test_only_what_runs_here_can_be_submitted() -> None:
    assert [p.field for p in not_runnable(on("megatron"))] == ["resources.stack"]
    assert not_runnable(SPEC) == []


def test_an_estimate_tells_its_stack_and_how_far_that_is_off() -> None:
    for stack, known in STACKS.items():
        told = estimate(on(stack), H100)["time"]["interval"]
        assert told["share"] == (known.within if stack != "megatron_2021" else max(s.within for s in STACKS.values()))
        assert known.title in told["words"]


def test_parts_of_every_stack_add_up() -> None:
    for stack in STACKS:
        t = step_time(on(stack), H100)
        parts = t.compute_s + t.recompute_s + sum(t.exposed_s.values()) + t.launch_s + t.bubble_s + t.optimizer_s
        assert t.step_s == pytest.approx(parts)


def test_tensor_waits_hide_only_where_the_stack_says_so() -> None:
    waits = {s: step_time(on(s), H100).exposed_s["tp"] for s in ("megatron_2021", "megatron")}
    left = waits["megatron_2021"] * (1 - STACKS["megatron"].hidden["tp"])
    assert waits["megatron"] == pytest.approx(left, rel=1e-3)  # norms' gradients are summed once a step, and seen


def test_a_stack_without_overlap_of_gradients_waits_for_all_of_them() -> None:
    hides, waits = (step_time(on(s), H100).exposed_s["dp"] for s in ("megatron_2021", "deepspeed"))
    assert waits > 10 * hides


def test_rows_that_do_not_begin_at_16_bytes_are_slow() -> None:
    chip = H100.accelerator
    odd, even = (gemm_seconds(Gemm(8192, n, 4096), chip, "bf16", 2) for n in (50257, 50264))
    assert odd > 5 * even
    assert gemm_seconds(Gemm(8192, 50257, 4096), chip, "fp32", 4) == pytest.approx(
        gemm_seconds(Gemm(8192, 50264, 4096), chip, "fp32", 4), rel=0.02
    )


def test_fp8_pays_for_its_casts_and_leaves_the_head_in_16_bits() -> None:
    fp8 = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"precision": "fp8"})})

    def casts(spec: JobSpec) -> int:
        return sum(k.num_bytes for k in layer_work(spec).forward if isinstance(k, Pass) and k.kind == "casts")

    tokens, h, inner = 2 * 4096, 4096, 14336 // 2
    assert casts(SPEC) == 0
    assert casts(fp8) == 4 * tokens * (h + h // 2 + inner)  # inputs of q, k and v, of gate and up are cast once
    wide, narrow = (Gemm(4096, 4096, 4096, wide=w) for w in (True, False))
    assert gemm_seconds(wide, H100.accelerator, "fp8", 2) > 1.5 * gemm_seconds(narrow, H100.accelerator, "fp8", 2)


def test_a_token_goes_once_to_a_node_where_the_stack_says_so() -> None:
    model = PRESETS["mixtral-8x7b"].model
    many = MoeSpec(num_experts=64, experts_per_token=8, expert_ffn_hidden_size=1408)
    spec = SPEC.model_copy(
        update={
            "model": model.model_copy(update={"moe": many}),
            "layout": Layout(dp=32, tp=2, ep=16, sequence_parallel=True),
        }
    )
    once, each = (step_time(on(s, spec), H100).exposed_s["ep"] for s in ("megatron", "ours"))
    nodes = 4
    visited = nodes * (1 - (1 - 1 / nodes) ** 8)
    assert once / each == pytest.approx(visited / 8 / 2, rel=1e-6)


def measured(*collectives: CollectivePoint) -> HostProfile:
    return HostProfile(
        device="cpu",
        device_name="a host",
        torch_version="2.13",
        cores=2,
        slots=8,
        memory_bytes=2**34,
        measured_at="2026-11-22T07:00:00+00:00",
        gemm=(GemmPoint(ranks=1, precision="fp32", m=512, n=512, k=512, seconds=1e-3),),
        stream=(StreamPoint(ranks=1, num_bytes=2**20, seconds=1e-4),),
        collectives=collectives,
    )


def test_what_was_measured_inside_a_host_says_nothing_of_groups_across_hosts() -> None:
    spec = SPEC.model_copy(update={"layout": Layout(dp=16), "train": SPEC.train.model_copy(update={"overlap": False})})
    free = CollectivePoint(op="all_reduce", group_size=16, ranks=1, payload_bytes=2**20, seconds=1e-12)
    exposed = [
        step_time(spec, cluster_of("here", profile).model_copy(update={"network": H100.network})).exposed_s["dp"]
        for profile in (measured(), measured(free))
    ]
    assert exposed[0] == exposed[1] > 0


def test_nothing_comes_on_top_of_what_a_host_was_measured_at() -> None:
    here = cluster_of("here", measured())
    assert len({step_time(on(stack), here).step_s for stack in STACKS}) == 1


def test_an_interval_holds_only_for_accelerators_that_it_was_measured_on() -> None:
    widest = max(known.within for known in STACKS.values())
    narrow: tuple[StackName, ...] = ("megatron_2021", "fsdp1", "deepspeed")
    for stack in narrow:
        shares = {
            name: estimate(on(stack), CLUSTERS[name])["time"]["interval"]["share"] for name in ("a100-80gb", "gb200")
        }
        assert shares == {"a100-80gb": STACKS[stack].within, "gb200": widest}


def test_runs_of_our_stack_correct_no_plan_for_another() -> None:
    runs = tuple(Run(spec=stripped(SPEC), steps=9, step_s=s, peak_bytes=None, links=()) for s in (90.0, 91.0, 92.0))
    here = H100.model_copy(update={"runs": runs})
    assert estimate(SPEC, here)["time"]["interval"]["runs"] == 3
    told = estimate(on("megatron"), here)["time"]
    assert (told["interval"]["runs"], told["step_s"]) == (0, step_time(on("megatron"), H100).step_s)
