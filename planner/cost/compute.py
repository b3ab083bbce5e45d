"""The time of a stage's kernels on one micro-batch, and the time that the device waits for its host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.resolved_plan import MicroBatch, ResolvedPlan
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import get_micro_batch_tokens
from planner.hardware.calibration import Calibration, MeasuredSeconds
from planner.hardware.cluster import DEFAULT_LAUNCH_S, Accelerator
from planner.hardware.kernel_time import AttentionRates, compute_kernel_seconds
from planner.hardware.kernels import (
    FlashAttention,
    Gemm,
    Kernel,
    MemoryKernel,
    ModuleKernels,
    build_embedding_kernels,
    build_head_kernels,
    build_layer_kernels,
)
from planner.hardware.stack_options import StackKey, Stacks
from planner.hardware.stacks import Stack

# Parts of accelerator names.
AMPERE, HOPPER = ("A100", "A800"), ("H100", "H200", "H800", "H20")
BLACKWELL = ("B200", "B300")


class ModuleSeconds(NamedTuple):
    """Seconds of a piece of the model.

    Attributes:
        recompute_s: time of recomputed kernels.
        attention_s: attention over keys and values, part of forward and backward.
        launch_s: time that the device waits for the launches of its host.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    recompute_s: float = 0.0
    attention_s: float = 0.0
    launch_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_input_s + self.backward_weight_s + self.recompute_s


class LaunchQueue(NamedTuple):
    """Seconds that the host needs to launch kernels, and that the device needs to run them."""

    host_s: float = 0.0
    device_s: float = 0.0


class TimedModule(NamedTuple):
    """A piece of the model and the launch queues of its forward and backward.

    Attributes:
        seconds: its times. Here `launch_s` counts only launches that no kernel overlaps.
        weights: elements of the gradients that its matmuls compute.
    """

    seconds: ModuleSeconds
    forward: LaunchQueue = LaunchQueue()
    backward: LaunchQueue = LaunchQueue()
    weights: int = 0


class ResolvedStack(NamedTuple):
    """The constants of a stack as a plan uses it, and the accelerator at the rates that the stack reaches."""

    key: StackKey
    stack: Stack
    accelerator: Accelerator


class ComputeTimer:
    """Times the kernels of pipeline stages. Layouts with equal micro-batches share the times of their pieces."""

    def __init__(self, accelerator: Accelerator, stacks: Stacks, calibration: Calibration | None) -> None:
        self.stacks, self.calibration = stacks, calibration
        self._chip = accelerator
        self._software: dict[StackKey, ResolvedStack] = {}
        self._pieces: dict[tuple[MicroBatch, StackKey, int], tuple[TimedModule, ...]] = {}

    def get_software(self, plan: ResolvedPlan) -> ResolvedStack:
        """Return the constants for a plan."""
        key = self.stacks.get_key(plan.spec)
        if key not in self._software:
            stack = self.stacks.get_stack(plan.spec)
            self._software[key] = ResolvedStack(key, stack, tune_accelerator(self._chip, stack))
        return self._software[key]

    def time_stage(self, plan: ResolvedPlan, stage: int, ranks: int) -> ModuleSeconds:
        """Return the compute of one micro-batch on a stage, with `ranks` at work on a node."""
        own, software = plan.partition.stages[stage], self.get_software(plan)
        layer, moe, embedding, head = self._time_pieces(plan.micro_batch, software, ranks)
        dense = own.num_layers - own.num_moe_layers
        parts = [(layer, dense), (moe, own.num_moe_layers), (embedding, own.stage.first), (head, own.stage.last)]
        found = ModuleSeconds(*(sum(part.seconds[i] * number for part, number in parts) for i in range(6)))
        added = _time_autograd_sums(plan, software, sum(part.weights * number for part, number in parts))
        found = found._replace(backward_weight_s=found.backward_weight_s + added)
        chunks = len(own.stage.chunks)
        layers = [(layer, dense / chunks), (moe, own.num_moe_layers / chunks)]
        first, last = (embedding, own.stage.first), (head, own.stage.last)
        if chunks == 1:
            waited = _time_launch_waits(software, [*layers, first, last])
        else:
            waited = _time_launch_waits(software, [*layers, first]) + _time_launch_waits(software, [*layers, last])
            waited += (chunks - 2) * _time_launch_waits(software, layers)
        return found._replace(launch_s=found.launch_s + waited)

    def _time_pieces(self, work: MicroBatch, software: ResolvedStack, ranks: int) -> tuple[TimedModule, ...]:
        """Return the layer, the layer with experts, the embedding, and the head of one micro-batch."""
        key = work, software.key, ranks
        if key not in self._pieces:
            spec, stack, moe = work.spec, software.stack, TimedModule(ModuleSeconds(0, 0, 0))
            if spec.model.moe:
                kernels = build_layer_kernels(
                    spec,
                    moe=True,
                    fused_projections=stack.fuses_projections,
                    sorts_tokens=stack.sorts_dispatch,
                    copies_queries=stack.copies_queries,
                    casts_all_operands=stack.casts_all_operands,
                )
                moe = _time_layer(spec, software, kernels, waits=stack.syncs_experts)
                moe = _add_host_time(moe, stack.mixture_s, waits=stack.syncs_experts)
            head = build_head_kernels(spec, gathers_logits=stack.gathers_logits)
            ends = _time_work(spec, software, build_embedding_kernels(spec)), _time_work(spec, software, head)
            pieces = (_time_layer(spec, software, _get_dense_work(spec, stack)), moe, *ends)
            self._pieces[key] = self._replace_measured(spec, software, pieces, ranks)
        return self._pieces[key]

    def _replace_measured(
        self, spec: JobSpec, software: ResolvedStack, pieces: tuple[TimedModule, ...], ranks: int
    ) -> tuple[TimedModule, ...]:
        """Return the pieces with the times of those that a calibration measured, scaled by the estimated recompute."""
        if self.calibration is None:
            return pieces
        layer, moe, embedding, head = pieces
        if found := self.calibration.get_layer_seconds(spec, ranks):
            layer = TimedModule(_extrapolate(found, layer.seconds, _time_short_layer(spec, software, found.seq_len)))
        if found := self.calibration.get_end_seconds(spec, ranks):
            head = TimedModule(ModuleSeconds(found.forward_s, found.backward_s / 2, found.backward_s / 2))
            embedding = TimedModule(ModuleSeconds(0, 0, 0))
        return layer, moe, embedding, head

    def has_measured_collectives(self, plan: ResolvedPlan, ranks: int) -> bool:
        """Return whether the calibration measured layers with their tensor-parallel collectives."""
        if self.calibration is None or plan.layout.tp == 1:
            return False
        return self.calibration.get_layer_seconds(plan.spec, ranks) is not None


def _time_launch_waits(software: ResolvedStack, chunk: Sequence[tuple[TimedModule, float]]) -> float:
    """Return the seconds that the device waits for its host in forward and backward of a chunk.

    The host runs ahead within a forward or a backward, so that long kernels of a head give it time for layers. It waits
    for the neighboring stages in between.
    """
    start = software.stack.chunk_launches * software.accelerator.launch_s
    forward = sum((piece.forward.host_s - piece.forward.device_s) * number for piece, number in chunk)
    backward = sum((piece.backward.host_s - piece.backward.device_s) * number for piece, number in chunk)
    return max(0.0, start + forward) + max(0.0, start + backward)


def _get_dense_work(spec: JobSpec, stack: Stack) -> ModuleKernels:
    return build_layer_kernels(
        spec,
        fused_projections=stack.fuses_projections,
        copies_queries=stack.copies_queries,
        casts_all_operands=stack.casts_all_operands,
    )


def _time_short_layer(spec: JobSpec, software: ResolvedStack, seq_len: int) -> ModuleSeconds:
    """Return the estimate for a layer as a calibration measures it: short whole sequences and fused attention."""
    tokens = get_micro_batch_tokens(spec)
    size = max(1, round(tokens / seq_len))
    layout = spec.layout.model_copy(update={"cp": 1})
    batch = {"global_batch": size * layout.dp * spec.train.micro_batches, "seq_len": seq_len}
    train = spec.train.model_copy(update={**batch, "attention": "fused", "document_end": None})
    short = spec.model_copy(update={"layout": layout, "train": train})
    times = _time_work(short, software, _get_dense_work(short, software.stack)).seconds
    return ModuleSeconds(*(seconds * tokens / (size * seq_len) for seconds in times))


def _time_layer(spec: JobSpec, software: ResolvedStack, work: ModuleKernels, *, waits: bool = False) -> TimedModule:
    stack = software.stack
    piece = _time_work(spec, software, work, waits=waits)
    times = piece.seconds._replace(attention_s=_time_kernels(spec, software, work.attention))
    if spec.layout.recompute == "none":
        return piece._replace(seconds=times)
    whole = spec.layout.recompute == "full"
    selected = work.recomputed_operations if stack.recomputes_operations else work.recomputed
    again = _get_recomputed(work, stack) if whole else selected
    repeated = _time_kernels(spec, software, again)
    host = piece.backward.host_s + _time_launches(spec, software, again)
    backward = LaunchQueue(host, piece.backward.device_s + repeated)
    return piece._replace(seconds=times._replace(recompute_s=repeated), backward=backward)


def _time_work(spec: JobSpec, software: ResolvedStack, work: ModuleKernels, *, waits: bool = False) -> TimedModule:
    """Return the times of a piece. `waits`: the host waits for the router, so its launches in forward are exposed."""
    parts = (work.forward, work.backward_input, work.backward_weight)
    forward, backward_input, backward_weight = (_time_kernels(spec, software, kernels) for kernels in parts)
    backward_weight += _time_gradient_adds(spec, software, work.backward_weight)
    hosts = [_time_launches(spec, software, kernels) for kernels in parts]
    times = ModuleSeconds(forward, backward_input, backward_weight, launch_s=hosts[0] if waits else 0.0)
    backward = LaunchQueue(hosts[1] + hosts[2], backward_input + backward_weight)
    return TimedModule(
        times,
        LaunchQueue() if waits else LaunchQueue(hosts[0], forward),
        backward,
        _count_elements(work.backward_weight),
    )


def _time_kernels(spec: JobSpec, software: ResolvedStack, kernels: Sequence[Kernel]) -> float:
    mix, stack, accelerator = get_mixed_precision(spec.train.precision), software.stack, software.accelerator
    seconds = 0.0
    for kernel in kernels:
        times = (
            get_attention_model(accelerator, stack).compute_slowdown(kernel)
            if isinstance(kernel, FlashAttention)
            else 1.0
        )
        one = compute_kernel_seconds(kernel, accelerator, mix.gemm, mix.compute_bytes, attention=times)
        seconds += one * stack.get_byte_factor(kernel.kind) if isinstance(kernel, MemoryKernel) else one
    return seconds


def _time_gradient_adds(spec: JobSpec, software: ResolvedStack, kernels: Sequence[Kernel]) -> float:
    """Return the extra seconds of matmuls that add to a gradient, which they read and write in its own type."""
    share, chip = software.stack.accumulation_share, software.accelerator
    moved = 2 * get_mixed_precision(spec.train.precision).gradient_bytes * _count_elements(kernels)
    return share * moved / (chip.bytes_per_s * chip.memory_efficiency)


def _get_accumulated_share(plan: ResolvedPlan, stack: Stack) -> float:
    """Return the share of micro-batches whose gradients autograd adds in a separate kernel.

    Return 0 if ZeRO reduces the gradients of each micro-batch.
    """
    m = plan.train.micro_batches
    if not stack.accumulates_separately or plan.layout.zero >= 2:
        return 0.0
    return (m - 1) / m


def _time_autograd_sums(plan: ResolvedPlan, software: ResolvedStack, elements: float) -> float:
    """Return the seconds that autograd needs per micro-batch to read two gradients and write their sum."""
    mix, chip, stack = plan.mix, software.accelerator, software.stack
    moved = _get_accumulated_share(plan, stack) * (2 * mix.gradient_bytes + mix.compute_bytes) * elements
    if mix.gradient_bytes != mix.compute_bytes:
        moved *= stack.mixed_accumulation_slowdown
    return moved / (chip.bytes_per_s * chip.memory_efficiency)


def _time_launches(spec: JobSpec, software: ResolvedStack, kernels: Sequence[Kernel]) -> float:
    """Return the seconds that the host needs to launch kernels. The call of a matmul casts its operands."""
    calls = sum(not (isinstance(kernel, MemoryKernel) and kernel.kind == "casts") for kernel in kernels)
    experts = sum(kernel.experts for kernel in kernels if isinstance(kernel, Gemm))
    stack = software.stack
    narrow = get_mixed_precision(spec.train.precision).gemm == "fp8"
    expert_s = stack.expert_s + (stack.expert_cast_s if narrow else 0.0)
    cast = sum(isinstance(kernel, Gemm) and not kernel.wide and not kernel.experts for kernel in kernels)
    more = experts * expert_s + (cast * stack.cast_s if narrow else 0.0)
    return calls * software.accelerator.launch_s + more


def _count_elements(products: Sequence[Kernel]) -> int:
    """Return the output elements of all matmuls."""
    return sum(kernel.m * kernel.n * kernel.batch for kernel in products if isinstance(kernel, Gemm))


def _get_recomputed(work: ModuleKernels, stack: Stack) -> list[Kernel]:
    """Return the kernels that full recompute repeats."""
    kernels = list(work.forward)
    if stack.skips_last_matmul:
        for kernel in work.unused_in_backward:
            kernels.remove(kernel)
    return kernels


def _extrapolate(found: MeasuredSeconds, layer: ModuleSeconds, short: ModuleSeconds) -> ModuleSeconds:
    """Return measured times of short sequences, scaled by the estimates of `layer` and of such a `short` layer."""
    forward_s = found.forward_s * layer.forward_s / short.forward_s
    backward = layer.backward_input_s + layer.backward_weight_s
    backward_s = found.backward_s * backward / (short.backward_input_s + short.backward_weight_s)
    weight_s = found.backward_s / 2
    again = forward_s / layer.forward_s
    return ModuleSeconds(
        forward_s, backward_s - weight_s, weight_s, layer.recompute_s * again, layer.attention_s * again
    )


def _add_host_time(layer: TimedModule, seconds: tuple[float, float], *, waits: bool) -> TimedModule:
    """Return the layer with additional seconds of its host in forward and in backward."""
    forward, backward = seconds
    layer = layer._replace(backward=layer.backward._replace(host_s=layer.backward.host_s + backward))
    if waits:
        return layer._replace(seconds=layer.seconds._replace(launch_s=layer.seconds.launch_s + forward))
    return layer._replace(forward=layer.forward._replace(host_s=layer.forward.host_s + forward))


def get_attention_model(accelerator: Accelerator, stack: Stack) -> AttentionRates:
    """Return the efficiency model of a stack's attention kernel on a GPU generation."""
    laws = ((AMPERE, stack.attention_ampere), (HOPPER, stack.attention_hopper), (BLACKWELL, stack.attention_blackwell))
    return next((law for kinds, law in laws if any(kind in accelerator.name for kind in kinds)), AttentionRates())


def tune_accelerator(accelerator: Accelerator, stack: Stack) -> Accelerator:
    """Return the accelerator at the rates that the stack reaches."""
    gemm = stack.gemm * (stack.gemm_hopper if accelerator.fp8_flops else 1)
    gemm *= stack.gemm_blackwell if accelerator.fp4_flops else 1
    attention = stack.attention * get_attention_model(accelerator, stack).peak_factor
    narrow = accelerator.fp4_flops if stack.fp4 and accelerator.fp4_flops else accelerator.fp8_flops
    return accelerator.model_copy(
        update={
            "fp8_flops": narrow,
            "gemm_efficiency": accelerator.gemm_efficiency * gemm,
            "fp8_efficiency": accelerator.fp8_efficiency * gemm * stack.gemm_fp8,
            "attention_efficiency": accelerator.attention_efficiency * attention,
            "launch_s": accelerator.launch_s * stack.launch_s / DEFAULT_LAUNCH_S,
        }
    )
