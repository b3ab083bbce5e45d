"""How long a stage's kernels take on one micro-batch: each by itself, and what its host lets the device wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.memory import megatron
from planner.facts.precision import FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import StageLayers, get_micro_batch_tokens
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
from planner.hardware.stack_options import Said, Stacks
from planner.hardware.stacks import Stack

AMPERE, HOPPER = ("A100",), ("H100", "H200")  # of their names
BLACKWELL = ("B200", "B300")


class Halves(NamedTuple):
    """Seconds of a piece of the model: forward, backward of inputs, backward of weights, what recompute repeats.

    `attention_s`: the part of forward and backward that is attention over keys and values. `launch_s`: what the device
    waits because its host launches more slowly than it runs.
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


class Queue(NamedTuple):
    """Seconds that the host needs to launch kernels, and that the device needs to run them meanwhile."""

    host_s: float = 0.0
    device_s: float = 0.0


class Piece(NamedTuple):
    """A piece of the model, whose own `launch_s` is what nothing hides, and the queues of its forward and backward.

    `weights`: elements of the gradients that its products make.
    """

    halves: Halves
    forward: Queue = Queue()
    backward: Queue = Queue()
    weights: int = 0


class Compute:
    """Times stages' kernels with each stack's constants; what layouts share is computed once."""

    def __init__(self, accelerator: Accelerator, stacks: Stacks, calibration: Calibration | None) -> None:
        self.stacks, self.calibration = stacks, calibration
        self._chip = accelerator
        self._accelerators: dict[Said, Accelerator] = {}
        self._pieces: dict[tuple[object, ...], tuple[Piece, ...]] = {}

    def accelerator(self, spec: JobSpec) -> Accelerator:
        """As the spec's stack uses it."""
        said = self.stacks.said(spec)
        if said not in self._accelerators:
            self._accelerators[said] = tuned(self._chip, self.stacks.of(spec))
        return self._accelerators[said]

    def of_stage(self, spec: JobSpec, own: StageLayers, ranks: int) -> Halves:
        layer, moe, embedding, head = self._piece(spec, ranks)
        dense = own.num_layers - own.num_moe_layers
        heads = own.stage.last * self.stacks.of(spec).heads
        parts = [(layer, dense), (moe, own.num_moe_layers), (embedding, own.stage.first), (head, heads)]
        found = Halves(*(sum(part.halves[i] * number for part, number in parts) for i in range(6)))
        added = self._accumulated_s(spec, sum(part.weights * number for part, number in parts))
        found = found._replace(backward_weight_s=found.backward_weight_s + added)
        chunks = len(own.stage.chunks)
        layers = [(layer, dense / chunks), (moe, own.num_moe_layers / chunks)]
        first, last = (embedding, own.stage.first), (head, heads)
        if chunks == 1:
            waited = self._waited_s(spec, [*layers, first, last])
        else:
            waited = self._waited_s(spec, [*layers, first]) + self._waited_s(spec, [*layers, last])
            waited += (chunks - 2) * self._waited_s(spec, layers)
        return found._replace(launch_s=found.launch_s + waited + self._offloaded_s(spec, dense, own.num_moe_layers))

    def _waited_s(self, spec: JobSpec, chunk: Sequence[tuple[Piece, float]]) -> float:
        """What the device waits for its host in forward and backward of a chunk that has so many of each piece. Within
        either the host runs ahead, so that a head's passes leave it time for layers; then it waits for its neighbours.
        """
        turn = self.stacks.of(spec).chunk_launches * self.accelerator(spec).launch_s
        forward = sum((piece.forward.host_s - piece.forward.device_s) * number for piece, number in chunk)
        backward = sum((piece.backward.host_s - piece.backward.device_s) * number for piece, number in chunk)
        return max(0.0, turn + forward) + max(0.0, turn + backward)

    def _offloaded_s(self, spec: JobSpec, dense: int, moe: int) -> float:
        """What the device waits for its host to take activations and give them back."""
        offloads = self.stacks.of(spec).offloads
        if not offloads:
            return 0.0
        saved = sum(n * megatron.saved_bytes(spec, moe=kind) for kind, n in ((False, dense), (True, moe)) if n)
        return 2 * offloads * saved / self.accelerator(spec).host_bytes_per_s

    def _piece(self, spec: JobSpec, ranks: int) -> tuple[Piece, ...]:
        """Layer, layer with experts, embedding and head: of one micro-batch on one rank."""
        layout, train = spec.layout, spec.train
        key = (
            *(
                layout.tp,
                layout.cp,
                layout.ep,
                layout.sequence_parallel,
                layout.recompute,
                layout.zero == 3,
                spec.model,
            ),
            *(ranks, spec.micro_batch_size, train.seq_len, train.precision, train.attention, train.dropout),
            train.document_end is None,
            self.stacks.said(spec),
        )
        if key not in self._pieces:
            stack, moe = self.stacks.of(spec), Piece(Halves(0, 0, 0))
            if spec.model.moe:
                work = build_layer_kernels(
                    spec,
                    moe=True,
                    fused_projections=stack.joins_products,
                    separate_experts=stack.experts_apart,
                    sorts_tokens=stack.sorts_dispatch,
                    norms_heads=stack.norms_heads,
                    copies_queries=stack.copies_queries,
                    casts_each=stack.casts_each,
                    recompute_modules=stack.repeats,
                )
                moe = _beside(
                    self._layer(spec, work, waits=stack.syncs_experts), stack.mixture_s, waits=stack.syncs_experts
                )
                slower = (stack.bias_sums - 1) * self._seconds(spec, work.bias_sums)
                moe = _slower(moe, slower)
            head = build_head_kernels(spec, gathers_logits=stack.gathers_logits, narrow=stack.narrow_head)
            ends = (self._whole(spec, build_embedding_kernels(spec)), self._whole(spec, head))
            pieces = (self._layer(spec, self._dense(spec)), moe, *ends)
            self._pieces[key] = self._measured(spec, pieces, ranks)
        return self._pieces[key]

    def _dense(self, spec: JobSpec) -> ModuleKernels:
        stack = self.stacks.of(spec)
        return build_layer_kernels(
            spec,
            fused_projections=stack.joins_products,
            norms_heads=stack.norms_heads,
            copies_queries=stack.copies_queries,
            casts_each=stack.casts_each,
            recompute_modules=stack.repeats,
        )

    def _measured(self, spec: JobSpec, pieces: tuple[Piece, ...], ranks: int) -> tuple[Piece, ...]:
        """Pieces whose shape a calibration measured, with its figures; of forward as much is repeated as estimated."""
        if self.calibration is None:
            return pieces
        layer, moe, embedding, head = pieces
        if found := self.calibration.get_layer_seconds(spec, ranks):
            layer = Piece(_as_long(found, layer.halves, self._short(spec, found.seq_len)))
        if found := self.calibration.ends(spec, ranks):
            head = Piece(Halves(found.forward_s, found.backward_s / 2, found.backward_s / 2))
            embedding = Piece(Halves(0, 0, 0))
        return layer, moe, embedding, head

    def _short(self, spec: JobSpec, seq_len: int) -> Halves:
        """A layer of as many tokens as a calibration has them: in whole, short sequences, and fused."""
        tokens = get_micro_batch_tokens(spec)
        size = max(1, round(tokens / seq_len))
        layout = spec.layout.model_copy(update={"cp": 1})
        batch = {"global_batch": size * layout.dp * spec.train.micro_batches, "seq_len": seq_len}
        train = spec.train.model_copy(update={**batch, "attention": "fused", "document_end": None})
        short = spec.model_copy(update={"layout": layout, "train": train})
        halves = self._whole(short, self._dense(short)).halves
        return Halves(*(seconds * tokens / (size * seq_len) for seconds in halves))

    def with_collectives(self, spec: JobSpec, ranks: int) -> bool:
        """Whether layers were measured with their tensor collectives."""
        if self.calibration is None or spec.layout.tp == 1:
            return False
        return self.calibration.get_layer_seconds(spec, ranks) is not None

    def _layer(self, spec: JobSpec, work: ModuleKernels, *, waits: bool = False) -> Piece:
        stack = self.stacks.of(spec)
        piece = _beside(self._whole(spec, work, waits=waits), stack.layer_s, waits=waits)
        halves = piece.halves._replace(attention_s=self._seconds(spec, work.attention))
        if spec.layout.recompute == "none":
            return piece._replace(halves=halves)
        whole = spec.layout.recompute == "full"
        selected = work.recomputed_operations if stack.repeats_operations else work.recomputed
        again, share = (_repeated(work, stack), stack.repeats_layers) if whole else (selected, 1.0)
        repeated = share * self._seconds(spec, again)
        host = piece.backward.host_s + share * self._host_s(spec, again)
        host += stack.layer_s[0] if whole or "latents" in (stack.repeats or ()) else 0.0
        backward = Queue(host, piece.backward.device_s + repeated)
        return piece._replace(halves=halves._replace(recompute_s=repeated), backward=backward)

    def _whole(self, spec: JobSpec, work: ModuleKernels, *, waits: bool = False) -> Piece:
        """`waits`: the host knows only after the router what to launch, so that none of its time in forward hides."""
        if self.stacks.of(spec).frozen:
            work = work._replace(backward_weight=())
        parts = (work.forward, work.backward_input, work.backward_weight)
        forward, backward_input, backward_weight = (self._seconds(spec, kernels) for kernels in parts)
        backward_weight += self._added_s(spec, work.backward_weight)
        hosts = [self._host_s(spec, kernels) for kernels in parts]
        halves = Halves(forward, backward_input, backward_weight, launch_s=hosts[0] if waits else 0.0)
        backward = Queue(hosts[1] + hosts[2], backward_input + backward_weight)
        return Piece(halves, Queue() if waits else Queue(hosts[0], forward), backward, _elements(work.backward_weight))

    def _seconds(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        mix, accelerator = get_mixed_precision(spec.train.precision), self.accelerator(spec)
        stack = self.stacks.of(spec)
        seconds = 0.0
        for kernel in kernels:
            times = (
                attention_law(accelerator, stack).compute_slowdown(kernel)
                if isinstance(kernel, FlashAttention)
                else 1.0
            )
            one = compute_kernel_seconds(kernel, accelerator, mix.gemm, mix.compute_bytes, attention=times)
            seconds += one * stack.bytes_of(kernel.kind) if isinstance(kernel, MemoryKernel) else one
        return seconds

    def _added_s(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        """What products wait that add to the gradients so far: each is read and written as wide as they are kept."""
        share, chip = self.stacks.of(spec).adds_gradients, self.accelerator(spec)
        moved = 2 * get_mixed_precision(spec.train.precision).gradient_bytes * _elements(kernels)
        return share * moved / (chip.bytes_per_s * chip.memory_efficiency)

    def accumulated(self, spec: JobSpec) -> float:
        """Share of micro-batches whose gradients autograd adds to those so far: all but the first, unless ZeRO has each
        one's summed and divided."""
        stack, m = self.stacks.of(spec), spec.train.micro_batches
        if not stack.adds_apart or (spec.layout.zero >= 2 and not stack.sums_late):
            return 0.0
        return (m - 1) / m

    def _accumulated_s(self, spec: JobSpec, elements: float) -> float:
        """Of a micro-batch: gradients are read, those so far too, and their sum is written."""
        mix, chip = get_mixed_precision(spec.train.precision), self.accelerator(spec)
        kept = FP32_BYTES if self.stacks.of(spec).sums_late else mix.gradient_bytes
        moved = self.accumulated(spec) * (2 * kept + mix.compute_bytes) * elements
        if kept != mix.compute_bytes:
            moved *= self.stacks.of(spec).adds_unlike
        return moved / (chip.bytes_per_s * chip.memory_efficiency)

    def _host_s(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        """What the host needs to launch them: a product's own call casts its operands."""
        calls = sum(not (isinstance(kernel, MemoryKernel) and kernel.kind == "casts") for kernel in kernels)
        experts = sum(kernel.experts for kernel in kernels if isinstance(kernel, Gemm))
        stack = self.stacks.of(spec)
        narrow = get_mixed_precision(spec.train.precision).gemm == "fp8"
        expert_s = stack.expert_s + (stack.expert_cast_s if narrow else 0.0)
        cast = sum(isinstance(kernel, Gemm) and not kernel.wide and not kernel.experts for kernel in kernels)
        more = experts * expert_s + (cast * stack.cast_s if narrow else 0.0)
        return calls * self.accelerator(spec).launch_s + more


def _elements(products: Sequence[Kernel]) -> int:
    return sum(kernel.m * kernel.n * kernel.batch for kernel in products if isinstance(kernel, Gemm))


def _repeated(work: ModuleKernels, stack: Stack) -> list[Kernel]:
    """By full recompute."""
    kernels = list(work.forward)
    if stack.repeats_needed:
        for kernel in work.unused_in_backward:
            kernels.remove(kernel)
    return kernels


def _as_long(found: MeasuredSeconds, layer: Halves, short: Halves) -> Halves:
    """What was measured of short sequences, with as much more as `layer` is estimated to take than such ones do."""
    forward_s = found.forward_s * layer.forward_s / short.forward_s
    backward = layer.backward_input_s + layer.backward_weight_s
    backward_s = found.backward_s * backward / (short.backward_input_s + short.backward_weight_s)
    weight_s = found.backward_s / 2
    again = forward_s / layer.forward_s
    return Halves(forward_s, backward_s - weight_s, weight_s, layer.recompute_s * again, layer.attention_s * again)


def _beside(layer: Piece, seconds: tuple[float, float], *, waits: bool) -> Piece:
    """With so many seconds more of its host in forward and in backward."""
    forward, backward = seconds
    layer = layer._replace(backward=layer.backward._replace(host_s=layer.backward.host_s + backward))
    if waits:
        return layer._replace(halves=layer.halves._replace(launch_s=layer.halves.launch_s + forward))
    return layer._replace(forward=layer.forward._replace(host_s=layer.forward.host_s + forward))


def _slower(piece: Piece, seconds: float) -> Piece:
    """Its backward of inputs takes so many seconds longer."""
    halves, queue = piece.halves, piece.backward
    return piece._replace(
        halves=halves._replace(backward_input_s=halves.backward_input_s + seconds),
        backward=queue._replace(device_s=queue.device_s + seconds),
    )


def attention_law(accelerator: Accelerator, stack: Stack) -> AttentionRates:
    laws = ((AMPERE, stack.attention_ampere), (HOPPER, stack.attention_hopper), (BLACKWELL, stack.attention_blackwell))
    return next((law for kinds, law in laws if any(kind in accelerator.name for kind in kinds)), AttentionRates())


def tuned(accelerator: Accelerator, stack: Stack) -> Accelerator:
    """The accelerator as the stack uses it."""
    gemm = stack.gemm * (stack.gemm_hopper if accelerator.fp8_flops else 1)
    attention = stack.attention * attention_law(accelerator, stack).peak_factor
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
