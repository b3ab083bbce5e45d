"""Training stacks: different times and memory for the same kernels and links, on the planned cluster."""

from __future__ import annotations

from typing import get_args

import pytest

from planner.cost.compute import ModuleSeconds
from planner.cost.estimate import compute_allowance, estimate, get_rank_memory
from planner.cost.memory import count_held_parameters, get_layer_bytes, get_memory, get_stage_memory
from planner.cost.memory.layer import count_saved_outputs
from planner.cost.memory.pieces import record_head
from planner.cost.memory.tape import LOGITS
from planner.cost.resolved_plan import MicroBatch, resolve
from planner.cost.stage_time import compute_exposed
from planner.cost.timing import Timer, get_step_timing
from planner.facts.model_parts import MlaSpec, MoeSpec
from planner.facts.precision import MIXED_PRECISIONS
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources, StackName
from planner.facts.spec import JobSpec, Layout
from planner.facts.spec_rules import find_unsupported_fields
from planner.hardware.calibration import build_cluster
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import NodeSpan
from planner.hardware.kernel_time import compute_collective_seconds, compute_gemm_seconds
from planner.hardware.kernels import Gemm, MemoryKernel, build_head_kernels, build_layer_kernels
from planner.hardware.profile import CollectivePoint, MeasuredRun, strip_spec
from planner.hardware.stacks import STACKS, Stack
from tests.planner.hardware.reference_specs import H100, SPEC, TRAIN, build_calibration, with_stack


def test_every_stack_in_the_spec_has_constants() -> None:
    assert set(STACKS) == set(get_args(StackName))
    times = {stack: get_step_timing(with_stack(stack), H100).step_s for stack in STACKS}
    assert len(set(times.values())) == len(STACKS)


def _get_shape(spec: JobSpec) -> MicroBatch:
    return resolve(spec).micro_batch


def test_one_timer_separates_stacks() -> None:
    timer = Timer(H100)
    assert [timer.get_step(with_stack(s)).step_s for s in STACKS] == [
        get_step_timing(with_stack(s), H100).step_s for s in STACKS
    ]


def test_overlap_follows_the_planned_cluster() -> None:
    on_cpu = SPEC.model_copy(update={"resources": Resources(device="cpu")})
    assert get_step_timing(on_cpu, H100).step_s == get_step_timing(SPEC, H100).step_s


def test_only_the_trainer_stack_can_be_submitted() -> None:
    assert [p.field for p in find_unsupported_fields(with_stack("megatron"))] == ["resources.stack"]
    assert find_unsupported_fields(SPEC) == []


def test_parts_of_every_stack_add_up() -> None:
    for stack in STACKS:
        t = get_step_timing(with_stack(stack), H100)
        parts = t.compute_s + t.recompute_s + sum(t.exposed_s.values()) + t.launch_s + t.bubble_s + t.optimizer_s
        assert t.step_s == pytest.approx(parts)


def test_tensor_collectives_overlap_only_in_stacks_that_support_it() -> None:
    waits = {s: get_step_timing(with_stack(s), H100).exposed_s["tp"] for s in ("megatron_2021", "megatron")}
    left = waits["megatron_2021"] * (1 - STACKS["megatron"].overlap["tp"])
    # gradients of norms are summed once per step and stay get_exposed_dp
    assert waits["megatron"] == pytest.approx(left, rel=1e-3)


def test_stack_without_gradient_overlap_exposes_all_reductions() -> None:
    hides, waits = (get_step_timing(with_stack(s), H100).exposed_s["dp"] for s in ("megatron_2021", "deepspeed"))
    assert waits > 10 * hides


def test_rows_not_aligned_to_16_bytes_are_slow() -> None:
    chip = H100.accelerator
    odd, even = (compute_gemm_seconds(Gemm(8192, n, 4096), chip, "bf16", 2) for n in (50257, 50264))
    assert odd > 5 * even
    assert compute_gemm_seconds(Gemm(8192, 50257, 4096), chip, "fp32", 4) == pytest.approx(
        compute_gemm_seconds(Gemm(8192, 50264, 4096), chip, "fp32", 4), rel=0.02
    )


def test_fp8_adds_casts_and_leaves_the_head_in_16_bits() -> None:
    fp8 = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"precision": "fp8"})})

    def count_cast_bytes(spec: JobSpec) -> int:
        return sum(
            k.num_bytes for k in build_layer_kernels(spec).forward if isinstance(k, MemoryKernel) and k.kind == "casts"
        )

    tokens, h, inner = 2 * 4096, 4096, 14336 // 2
    assert count_cast_bytes(SPEC) == 0
    assert count_cast_bytes(fp8) == 4 * tokens * (
        h + h // 2 + inner
    )  # one cast serves q, k and v, and one serves gate and up
    wide, narrow = (Gemm(4096, 4096, 4096, wide=w) for w in (True, False))
    assert compute_gemm_seconds(wide, H100.accelerator, "fp8", 2) > 1.5 * compute_gemm_seconds(
        narrow, H100.accelerator, "fp8", 2
    )


def test_dispatch_per_node_sends_a_token_once_to_each_node() -> None:
    model = PRESETS["mixtral-8x7b"].model
    many = MoeSpec(num_experts=64, experts_per_token=8, expert_ffn_hidden_size=1408)
    spec = SPEC.model_copy(
        update={
            "model": model.model_copy(update={"moe": many}),
            "layout": Layout(dp=32, tp=2, ep=16, sequence_parallel=True),
        }
    )
    once, each = (get_step_timing(with_stack(s, spec), H100).exposed_s["ep"] for s in ("megatron", "ours"))
    nodes = 4
    visited = nodes * (1 - (1 - 1 / nodes) ** 8)
    assert once / each == pytest.approx(visited / 8 / 2, rel=1e-6)


def test_calibration_inside_a_host_does_not_cover_groups_across_hosts() -> None:
    spec = SPEC.model_copy(update={"layout": Layout(dp=16), "train": SPEC.train.model_copy(update={"overlap": False})})
    free = CollectivePoint(op="all_reduce", group_size=16, ranks=1, payload_bytes=2**20, seconds=1e-12)
    exposed = [
        get_step_timing(spec, build_cluster("here", profile).model_copy(update={"network": H100.network})).exposed_s[
            "dp"
        ]
        for profile in (build_calibration(), build_calibration(free))
    ]
    assert exposed[0] == exposed[1] > 0


def test_calibrated_host_has_no_stack_overhead() -> None:
    here = build_cluster("here", build_calibration())
    assert len({get_step_timing(with_stack(stack), here).step_s for stack in STACKS}) == 1


def test_runs_of_the_trainer_do_not_correct_another_stack() -> None:
    runs = tuple(
        MeasuredRun(spec=strip_spec(SPEC), steps=9, step_s=s, peak_bytes=None, links=()) for s in (90.0, 91.0, 92.0)
    )
    here = H100.model_copy(update={"runs": runs})
    assert estimate(SPEC, here)["time"]["interval"]["runs"] == 3
    told = estimate(with_stack("megatron"), here)["time"]
    assert (told["interval"]["runs"], told["step_s"]) == (0, get_step_timing(with_stack("megatron"), H100).step_s)


def test_gathered_logits_hold_and_move_the_whole_vocabulary() -> None:
    spec = with_stack("scaling", SPEC.model_copy(update={"layout": Layout(dp=32, tp=2, zero=1)}))
    logits = 2 * 4096 * 128_256  # tokens of a micro-batch x vocabulary
    piece = record_head(_get_shape(spec), "keep", tied=False, waits=False)
    assert piece.forward.net[LOGITS] == 2 * logits
    # The other rank's half arrives in a separate buffer. Both halves stay until they are joined.
    assert piece.forward.peak[LOGITS] == 2 * 2 * logits
    assert piece.loss.net[LOGITS] == 4 * logits, "log-softmax; the logits stay"
    assert piece.loss_backward.peak[LOGITS] == 8 * logits, "its gradient and that of its input, in fp32"
    assert piece.loss_backward.net[LOGITS] == (2 - 4 - 2) * logits, "the 16-bit gradient replaces the saved tensors"
    divided = record_head(_get_shape(with_stack("deepspeed", spec)), "keep", tied=False, waits=False)
    assert divided.forward.net[LOGITS] == logits

    passes = [
        sum(
            k.num_bytes
            for k in (*work.forward, *work.backward_input)
            if isinstance(k, MemoryKernel) and k.kind == "loss"
        )
        for work in (build_head_kernels(spec), build_head_kernels(spec, gathers_logits=True))
    ]
    assert passes == [(6 + 12 + 8 + 6) * logits // 2, (6 + 12 + 8 + 6) * logits]


def test_gathered_logits_are_exposed_in_each_micro_batch() -> None:
    spec = with_stack("scaling", SPEC.model_copy(update={"layout": Layout(dp=32, tp=2, zero=1)}))
    apart = {**STACKS, "scaling": STACKS["scaling"]._replace(gathers_logits=False)}
    waits = [Timer(H100, stacks).get_step(spec).exposed_s["tp"] for stacks in (STACKS, apart)]
    size = 2 * 4096 * 128_256 * 2  # tokens x vocabulary x bytes
    each = compute_collective_seconds("all_gather", size, NodeSpan(2, 1), H100) / STACKS["scaling"].link_efficiency
    assert waits[0] - waits[1] == pytest.approx(4 * each)


def test_stack_workspace_counts_on_gpus_without_calibration() -> None:
    a100, tensors = CLUSTERS["a100-80gb"], 40 * 10**9
    assert compute_allowance(with_stack("deepspeed"), a100, tensors) == 2 * 2**30 + 2 * 10**9 + 6 * 10**9
    assert compute_allowance(SPEC, a100, tensors) == 2 * 2**30 + 2 * 10**9
    on_cpu = CLUSTERS["cpu"]
    assert compute_allowance(with_stack("deepspeed"), on_cpu, tensors) == on_cpu.accelerator.compute_overhead_bytes(
        tensors
    )
    whole = get_rank_memory(with_stack("deepspeed"), 0, a100)
    assert whole["allowance"] == compute_allowance(
        with_stack("deepspeed"), a100, sum(whole.values()) - whole["allowance"]
    )


def test_both_gradient_types_are_held_if_the_optimizer_clears_the_narrow_one() -> None:
    held = [get_memory(with_stack(stack), 0)["gradients"] for stack in ("deepspeed", "ours")]
    whole = sum(chunk.parameters.count_elements() for chunk in get_stage_memory(SPEC).get_rank(0).chunks)
    assert held[0] - held[1] == 2 * whole
    narrow = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"precision": "bf16_gradients"})})
    assert get_memory(with_stack("deepspeed", narrow), 0)["gradients"] == get_memory(narrow, 0)["gradients"]


def test_selective_operations_save_every_second_matmul_and_attention() -> None:
    """Of q, k, v, o, gate, up and down, torchtitan saves the 1st, 3rd, 5th and 7th. It recomputes k, o and up."""
    layout = Layout(dp=32, zero=3, recompute="selective")
    spec = with_stack("fsdp2", SPEC.model_copy(update={"layout": layout}))
    tokens, h, kv, inner, heads = 2 * 4096, 4096, 1024, 14336, 32
    outputs = h + kv + inner + h + h  # q, v, gate, down, and the attention output
    assert count_saved_outputs(_get_shape(spec), moe=False) == tokens * (2 * outputs + 4 * heads)
    assert get_layer_bytes(spec) == tokens * (2 * (h + outputs) + 4 * heads), "the layer's input too"
    again = [k for k in build_layer_kernels(spec).recomputed_operations if isinstance(k, Gemm)]
    assert [(k.n, k.k) for k in again] == [(kv, h), (h, h), (inner, h)]

    gpt = spec.model_copy(update={"model": PRESETS["gpt3-175b"].model})
    assert count_saved_outputs(_get_shape(gpt), moe=False) == tokens * (
        2 * (3 + 4 + 1) * 12288 + 4 * 96
    )  # qkv, up, attention


def test_loss_is_one_kernel_if_the_compiler_fuses_it() -> None:
    compiled = with_stack("fsdp2", SPEC.model_copy(update={"train": TRAIN.model_copy(update={"compile": True})}))
    assert [_get_shape(s).fused_loss for s in (compiled, with_stack("fsdp2"), with_stack("fsdp1"), SPEC)] == [
        True,
        False,
        True,
        False,
    ]


def test_16_bit_state_takes_8_bytes_per_parameter_and_half_the_optimizer_traffic() -> None:
    """Weights, gradients and two moments take 2 bytes.

    An update reads and writes three of them and reads a gradient.
    """
    both = [
        SPEC.model_copy(update={"train": TRAIN.model_copy(update={"precision": p})}) for p in ("bf16", "bf16_state")
    ]
    state = MIXED_PRECISIONS["bf16_state"]
    assert (state.state_bytes, state.sharded_bytes, state.moment_bytes, state.has_master_weights) == (8, 2, 4, False)
    own = count_held_parameters(both[1], 0)
    parts = get_memory(both[1], 0)
    assert (parts["parameters"], parts["optimizer"]) == (2 * own, 4 * own)
    launched = {**STACKS, "ours": STACKS["ours"]._replace(tensor_s=0.0)}
    wide, narrow = (Timer(H100, launched).get_step(spec).optimizer_s - H100.accelerator.kernel_s for spec in both)
    assert narrow == pytest.approx(wide / 2)
    assert find_unsupported_fields(both[1]) == []


def test_overlap_does_not_exceed_the_compute_time() -> None:
    work = ModuleSeconds(1.0, 1.0, 1.0)
    assert compute_exposed(2.0, 0.8, work) == pytest.approx(0.4)
    assert compute_exposed(10.0, 0.8, work) == pytest.approx(7.0)


def test_sharded_layer_and_latent_attention_launch_small_kernels() -> None:
    def empty(spec: JobSpec) -> list[int]:
        work = build_layer_kernels(spec)
        return [kernels.count(MemoryKernel(0)) for kernels in (work.forward, work.backward_input)]

    sharded = SPEC.model_copy(update={"layout": SPEC.layout.model_copy(update={"zero": 3})})
    latent = MlaSpec(q_rank=192, kv_rank=64, nope_head_dim=16, rope_head_dim=8, value_head_dim=16)
    compressed = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"mla": latent})})
    assert [empty(spec) for spec in (SPEC, sharded, compressed)] == [[0, 0], [5, 10], [4, 4]]


def test_scores_without_dropout_are_kept_once() -> None:
    """In 2205.05198 section 4.1, scores take 5 a s^2 b bytes. The mask and the dropped copy take 3 of 5."""
    layout = Layout(dp=32, tp=2, zero=1, sequence_parallel=True, regather=True)
    train = [TRAIN.model_copy(update={"attention": "unfused", "dropout": dropout}) for dropout in (False, True)]
    plain, dropped = (with_stack("megatron", SPEC.model_copy(update={"layout": layout, "train": t})) for t in train)
    scores, masks = 2 * 16 * 4096**2, 2 * 2 * 4096 * 4096 // 2  # heads of a rank, and two masks of the divided stream
    assert get_layer_bytes(dropped) - get_layer_bytes(plain) == 3 * scores + masks


def test_matmul_waits_to_accumulate_gradients() -> None:
    apart = {**STACKS, "megatron": STACKS["megatron"]._replace(accumulation_share=0.0)}
    waits = [Timer(H100, stacks).get_step(with_stack("megatron")).backward_weight_s for stacks in (STACKS, apart)]
    chip, weights = (
        H100.accelerator,
        sum(g.m * g.n for g in build_layer_kernels(SPEC).backward_weight if isinstance(g, Gemm)),
    )
    head = 128_256 // 2 * 4096
    each = 0.5 * 2 * 4 * (32 * weights + head) / (chip.bytes_per_s * chip.memory_efficiency)
    assert waits[0] - waits[1] == pytest.approx(each, rel=1e-6)


@pytest.mark.parametrize(("m", "zero", "times"), [(1, 1, 0), (4, 1, 3), (4, 0, 3), (4, 3, 0)])
def test_gradient_accumulation_adds_a_kernel_after_the_first_micro_batch(m: int, zero: int, times: int) -> None:
    """The kernel reads 16 bits, and reads and writes 32.

    Mixed types are slower. ZeRO-3 sums and divides each gradient.
    """
    train = TRAIN.model_copy(update={"micro_batches": m})
    spec = SPEC.model_copy(update={"layout": Layout(dp=64, zero=zero), "train": train})
    together = {**STACKS, "ours": STACKS["ours"]._replace(accumulates_separately=False)}
    waits = [Timer(H100, stacks).get_step(spec).backward_weight_s for stacks in (STACKS, together)]
    weights = sum(g.m * g.n for g in build_layer_kernels(spec).backward_weight if isinstance(g, Gemm))
    moved = (4 + 2 + 4) * (32 * weights + 128_256 * 4096) * times * STACKS["ours"].mixed_accumulation_slowdown
    chip = H100.accelerator
    assert m * (waits[0] - waits[1]) == pytest.approx(moved / (chip.bytes_per_s * chip.memory_efficiency))


def test_fp32_gradients_summed_whole_are_twice_as_wide_and_sent_twice() -> None:
    """Compare with 16-bit sums over a network whose latency is negligible. Parameters are gathered as before."""
    slow = H100.model_copy(update={"network": H100.network.model_copy(update={"bytes_per_s": 1e7})})
    train = SPEC.train.model_copy(update={"precision": "bf16_gradients"})
    whole, shared = (STACKS["scaling"]._replace(all_reduces_fp32=kind) for kind in (True, False))

    def get_exposed_dp(zero: int, stack: Stack) -> float:
        spec = SPEC.model_copy(update={"layout": Layout(dp=32, zero=zero), "train": train})
        return Timer(slow, {"scaling": stack}).get_step(with_stack("scaling", spec)).exposed_s["dp"]

    assert get_exposed_dp(1, whole) / get_exposed_dp(1, shared) == pytest.approx((4 + 1) / 2, rel=0.01)
    assert get_exposed_dp(0, whole) / get_exposed_dp(0, shared) == pytest.approx(2, rel=0.01)


def test_network_reductions_continue_during_tensor_waits_in_the_node() -> None:
    slow = H100.network.model_copy(update={"bytes_per_s": 5e8})
    node = H100.node.model_copy(update={"bytes_per_s": H100.node.bytes_per_s / 10})
    fast, waiting = (H100.model_copy(update={"network": slow, "node": link}) for link in (H100.node, node))
    waits = [get_step_timing(SPEC, cluster).exposed_s for cluster in (fast, waiting)]
    assert waits[1]["tp"] > waits[0]["tp"]
    assert waits[1]["dp"] < waits[0]["dp"]


def test_megatron_keeps_fp8_weights_in_addition_to_16_bit_weights() -> None:
    """Each weight is stored as is and transposed, except the table and the head."""
    spec = SPEC.model_copy(update={"layout": Layout(dp=16, tp=2, zero=1, sequence_parallel=True)})
    kept = [
        get_memory(
            with_stack("megatron", spec.model_copy(update={"train": TRAIN.model_copy(update={"precision": p})})), 0
        )
        for p in ("bf16", "fp8")
    ]
    tables = 2 * 128256 // 2 * 4096 + 4096
    assert kept[1]["parameters"] - kept[0]["parameters"] == 2 * (count_held_parameters(spec, 0) * 16 - tables)
