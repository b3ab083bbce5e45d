"""How long a stage's kernels take on one micro-batch: each by itself, and what its host lets the device wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from planner.cost.memory import megatron
from planner.facts.precision import mix_of
from planner.facts.spec import JobSpec, StackName
from planner.facts.tensors.shards import Held
from planner.hardware.attention import Attention
from planner.hardware.calibration import Calibration
from planner.hardware.cluster import LAUNCH_S, Accelerator, kernel_seconds
from planner.hardware.kernels import Flash, Gemm, Kernel, Pass, Work, embedding_work, head_work, layer_work
from planner.hardware.stacks import Stack

HOPPER = ("H100", "H200")  # of their names
BLACKWELL = ("B200", "B300")


class Halves(NamedTuple):
    """Seconds of a piece of the model: forward, backward of inputs, backward of weights, what recompute repeats.

    `attention_s`: the part of forward and backward that is attention over keys and values. `launch_s`: what the device
    waits because its host launches the kernels of a half more slowly than they run.
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


class Compute:
    """Times stages' kernels with each stack's constants; what layouts share is computed once."""

    def __init__(
        self, accelerator: Accelerator, stacks: Mapping[StackName, Stack], calibration: Calibration | None
    ) -> None:
        self.stacks, self.calibration = stacks, calibration
        self._accelerators = {name: _tuned(accelerator, stack) for name, stack in stacks.items()}
        self._pieces: dict[tuple[object, ...], tuple[Halves, ...]] = {}

    def of_stage(self, spec: JobSpec, own: Held, ranks: int) -> Halves:
        layer, moe, embedding, head = self._piece(spec, ranks)
        dense = own.num_layers - own.num_moe_layers
        heads = own.stage.last * self.stacks[spec.resources.stack].heads
        parts = [(layer, dense), (moe, own.num_moe_layers), (embedding, own.stage.first), (head, heads)]
        found = Halves(*(sum(part[i] * number for part, number in parts) for i in range(6)))
        return found._replace(launch_s=found.launch_s + self._offloaded_s(spec, own.num_layers))

    def _offloaded_s(self, spec: JobSpec, layers: int) -> float:
        """What the device waits for its host to take activations and give them back."""
        name = spec.resources.stack
        if not self.stacks[name].offloads:
            return 0.0
        moved = 2 * self.stacks[name].offloads * layers * megatron.layer_bytes(spec, moe=False)
        return moved / self._accelerators[name].host_bytes_per_s

    def _piece(self, spec: JobSpec, ranks: int) -> tuple[Halves, ...]:
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
            spec.resources.stack,
        )
        if key not in self._pieces:
            stack, moe = self.stacks[spec.resources.stack], Halves(0, 0, 0)
            joined, repeats = stack.joins_products, stack.repeats
            if spec.model.moe:
                work = layer_work(
                    spec,
                    moe=True,
                    joined=joined,
                    apart=stack.experts_apart,
                    biased=stack.experts_biased,
                    clamped=stack.experts_clamped,
                    sorts=stack.sorts_dispatch,
                    norms_heads=stack.norms_heads,
                    window=stack.window,
                    repeats=repeats,
                )
                moe = self._layer(spec, work, waits=stack.syncs_experts)
                slower = (stack.bias_sums - 1) * self._seconds(spec, work.bias_sums)
                moe = moe._replace(backward_input_s=moe.backward_input_s + slower)
            head = head_work(spec, gathers_logits=stack.gathers_logits, narrow=stack.narrow_head)
            ends = (self._halves(spec, embedding_work(spec)), self._halves(spec, head))
            dense = layer_work(spec, joined=joined, norms_heads=stack.norms_heads, window=stack.window, repeats=repeats)
            pieces = (
                self._layer(spec, dense),
                moe,
                *ends,
            )
            self._pieces[key] = self._measured(spec, pieces, ranks)
        return self._pieces[key]

    def _measured(self, spec: JobSpec, pieces: tuple[Halves, ...], ranks: int) -> tuple[Halves, ...]:
        """Pieces whose shape a calibration measured, with its figures; of forward as much is repeated as estimated."""
        if self.calibration is None:
            return pieces
        layer, moe, embedding, head = pieces
        if found := self.calibration.layer(spec, ranks):
            repeated = found.forward_s * layer.recompute_s / layer.forward_s
            layer = Halves(found.forward_s, found.backward_s / 2, found.backward_s / 2, repeated)
        if found := self.calibration.ends(spec, ranks):
            head = Halves(found.forward_s, found.backward_s / 2, found.backward_s / 2)
            embedding = Halves(0, 0, 0)
        return layer, moe, embedding, head

    def with_collectives(self, spec: JobSpec, ranks: int) -> bool:
        """Whether layers were measured with their tensor collectives."""
        if self.calibration is None or spec.layout.tp == 1:
            return False
        return self.calibration.layer(spec, ranks) is not None

    def _layer(self, spec: JobSpec, work: Work, *, waits: bool = False) -> Halves:
        halves = self._halves(spec, work, waits=waits)._replace(attention_s=self._seconds(spec, work.attention))
        if spec.layout.recompute == "none":
            return halves
        stack, whole = self.stacks[spec.resources.stack], spec.layout.recompute == "full"
        selected = work.operations if stack.repeats_operations else work.repeated
        again, share = (work.forward, stack.repeats_layers) if whole else (selected, 1.0)
        repeated = self._seconds(spec, again)
        launch = share * self._launch(spec, again, repeated)
        return halves._replace(recompute_s=share * repeated, launch_s=halves.launch_s + launch)

    def _halves(self, spec: JobSpec, work: Work, *, waits: bool = False) -> Halves:
        """`waits`: the host knows only after the router what to launch, so that none of its time hides."""
        parts = (work.forward, work.backward_input, work.backward_weight)
        forward, backward_input, backward_weight = (self._seconds(spec, kernels) for kernels in parts)
        backward_weight += self._added_s(spec, work.backward_weight)
        seconds = (forward, backward_input, backward_weight)
        hides = (0.0, *seconds[1:]) if waits else seconds
        launch = sum(self._launch(spec, kernels, s) for kernels, s in zip(parts, hides, strict=True))
        return Halves(forward, backward_input, backward_weight, launch_s=launch)

    def _seconds(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        mix, accelerator = mix_of(spec.train.precision), self._accelerators[spec.resources.stack]
        stack = self.stacks[spec.resources.stack]
        seconds = 0.0
        for kernel in kernels:
            one = kernel_seconds(kernel, accelerator, mix.gemm, mix.compute)
            if isinstance(kernel, Pass):
                one *= stack.bytes_of(kernel.kind)
            if isinstance(kernel, Flash):
                one *= _attention(accelerator, stack).times(kernel)
            seconds += one
        return seconds

    def _added_s(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        """What products wait that add to the gradients so far: each is read and written as wide as they are kept."""
        share, chip = self.stacks[spec.resources.stack].adds_gradients, self._accelerators[spec.resources.stack]
        elements = sum(kernel.m * kernel.n * kernel.batch for kernel in kernels if isinstance(kernel, Gemm))
        moved = 2 * mix_of(spec.train.precision).gradients * elements
        return share * moved / (chip.bytes_per_s * chip.memory_efficiency)

    def _launch(self, spec: JobSpec, kernels: Sequence[Kernel], device_s: float) -> float:
        """What the host needs beyond the device: a product's own call casts its operands."""
        calls = sum(not (isinstance(kernel, Pass) and kernel.kind == "casts") for kernel in kernels)
        experts = sum(
            kernel.batch for kernel in kernels if isinstance(kernel, Gemm) and not kernel.wide and kernel.batch > 1
        )
        stack = self.stacks[spec.resources.stack]
        narrow = mix_of(spec.train.precision).gemm == "fp8"
        expert_s = stack.expert_s + (stack.expert_cast_s if narrow else 0.0)
        host_s = calls * self._accelerators[spec.resources.stack].launch_s + experts * expert_s
        return max(0.0, host_s - device_s)


def _attention(accelerator: Accelerator, stack: Stack) -> Attention:
    if any(kind in accelerator.name for kind in HOPPER):
        return stack.attention_hopper
    return stack.attention_blackwell if any(kind in accelerator.name for kind in BLACKWELL) else Attention()


def _tuned(accelerator: Accelerator, stack: Stack) -> Accelerator:
    """The accelerator as the stack uses it."""
    gemm = stack.gemm * (stack.gemm_hopper if accelerator.fp8_flops else 1)
    attention = stack.attention * _attention(accelerator, stack).share
    return accelerator.model_copy(
        update={
            "gemm_efficiency": accelerator.gemm_efficiency * gemm,
            "fp8_efficiency": accelerator.fp8_efficiency * gemm * stack.gemm_fp8,
            "attention_efficiency": accelerator.attention_efficiency * attention,
            "launch_s": accelerator.launch_s * stack.launch_s / LAUNCH_S,
        }
    )
