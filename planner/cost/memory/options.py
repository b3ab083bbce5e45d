"""Estimate the memory of methods that the trainer does not have: LoRA, quantized weights, other optimizers, offload.

The peak of a step is the highest of three moments: the loss, the backward of a layer, and the end of the backward.

Sources: LoRA 2106.09685; QLoRA 2305.14314 (section 3: NF4 with double quantization); LLM.int8 2208.07339; 8-bit and
paged optimizers 2110.02861 and 2305.14314; Adafactor 1804.04235 section 3; Muon (Jordan et al. 2024); ZeRO-Offload
2101.06840; ZeRO-Infinity 2104.07857. `tests/planner/cost/test_memory_options.py` compares published peaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from operator import mul
from typing import NamedTuple

from planner.cost.memory.moments import find_flights
from planner.cost.memory.pieces import record_head, record_layer
from planner.cost.memory.rank import Peak
from planner.cost.memory.tape import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    PARTS,
    WORKING,
    Levels,
    Stretch,
    join,
)
from planner.cost.memory.taped import TapedMemory
from planner.cost.resolved_plan import ResolvedPlan
from planner.facts.memory_options import MemoryOptions
from planner.facts.model_shapes import Parameter, is_router, is_vocabulary
from planner.facts.precision import FP32_BYTES

LOSS_CHUNKS = 8  # of torchtune's chunked cross-entropy
KEPT_LAYERS = 2  # of offloaded activations: the layer in use and the next one
# 8-bit moments with an fp32 scale per block of 256 (2110.02861 section 2.1)
MOMENT_8BIT_BYTES = 1 + FP32_BYTES / 256
# NF4: 4 bits, an 8-bit scale per 64 weights, and an fp32 scale per 256 scales (2305.14314 section 3)
NF4_BYTES = 0.5 + 1 / 64 + FP32_BYTES / (64 * 256)


class Counts(NamedTuple):
    """Elements of a stage on one tp and ep rank.

    Attributes:
        frozen: elements of frozen matrices that may be quantized.
        rest: elements of all other weights of the model.
        adapters: elements of LoRA adapters.
        largest: elements of the largest FSDP unit.
        gathered: elements of the two largest FSDP units, of which one is in use and one comes next.
        matrices: elements of trained hidden matrices, which Muon updates.
        factors: rows and columns of trained matrices, and elements of trained vectors (Adafactor).
    """

    frozen: int
    rest: int
    adapters: int
    largest: int
    gathered: int
    matrices: int
    factors: int


class OptionsMemory(TapedMemory):
    """The memory of each pipeline stage of a plan with memory options."""

    def __init__(self, plan: ResolvedPlan) -> None:
        super().__init__(plan)
        assert plan.spec.memory is not None
        self.options: MemoryOptions = plan.spec.memory
        self._counts: dict[int, Counts] = {}

    def find_peak(self, stage: int) -> Peak:
        moments = {
            "at the loss": self._add(self._saved(stage, loss=True), self._loss),
            "in the backward of a layer": self._add(self._saved(stage, loss=False), self._backward),
            "at the end of the backward": self._add(self._full_gradients(stage), self._last_backward),
        }
        if self.plan.train.micro_batches > 1:  # Gradients of earlier micro-batches are complete.
            for when in ("at the loss", "in the backward of a layer"):
                moments[when] = self._add(moments[when], self._full_gradients(stage))
        if not self.get_rank(stage).chunks[-1].parameters.last:
            del moments["at the loss"]
        when, levels = max(moments.items(), key=lambda item: sum(item[1]))
        return Peak(self._add(self._persistent(stage), levels), when)

    def get_max_bytes(self, stages: tuple[int, ...], limit: int | None = None) -> int:
        return sum(self.find_peak(stages[0]).levels)

    def get_min_bytes(self, stage: int) -> int:
        return sum(self._persistent(stage)) + sum(self._full_gradients(stage))

    def get_gradient_bytes(self, stage: int) -> int:
        return self._full_gradients(stage)[GRADIENTS]

    def get_host_bytes(self, stage: int) -> int:
        """Return the bytes of a rank in CPU memory."""
        options, counts, mix = self.options, self._count(stage), self.plan.mix
        total = 0
        if options.offload != "none":
            gradients = self._count_trained(counts) * mix.gradient_bytes
            total += self._shard(self._get_moment_bytes(counts) + self._get_master_bytes(counts) + gradients)
        elif options.optimizer == "paged_adamw_8bit":
            total += self._shard(self._get_moment_bytes(counts))
        if options.offload == "optimizer_and_parameters":
            total += self._shard(self._get_weight_bytes(counts, mix.compute_bytes))
        if options.offload_activations:
            total += max(0, self._get_layer_saves(stage) - KEPT_LAYERS * self._layer_saves)
        return total

    def _count(self, stage: int) -> Counts:
        if stage not in self._counts:
            self._counts[stage] = self._make_counts(stage)
        return self._counts[stage]

    def _make_counts(self, stage: int) -> Counts:
        rank, targets = self.options.lora_rank, self.options.lora_targets
        units = self.plan.partition.get_units(stage)
        frozen = rest = adapters = matrices = factors = 0
        for parameter in (p for unit in units for p in unit.parameters):
            linear = is_linear(parameter)
            if rank and linear:
                frozen += parameter.numel
            else:
                rest += parameter.numel
            if rank and linear and (targets == "all_linear" or parameter.name.startswith("attention.")):
                adapters += rank * _count_sides(parameter)
            if not rank:
                matrices += parameter.numel * linear
                factors += _count_sides(parameter) if len(parameter.shape) > 1 else parameter.numel
        *_, second, largest = sorted([0, *(sum(p.numel for p in unit.parameters) for unit in units)])
        # An adapter is two matrices. Their rows and columns are the sides of the target plus twice the rank.
        factors += adapters // rank if rank else 0
        return Counts(frozen, rest, adapters, largest, largest + second, adapters or matrices, factors)

    def _count_trained(self, counts: Counts) -> int:
        return counts.adapters if self.options.lora_rank else counts.rest

    def _shard(self, num_bytes: float, stage: int = 1) -> int:
        """Return one rank's share, if ZeRO shards this state from `stage` on."""
        return round(num_bytes / self.plan.shard_groups[0].size if self.plan.layout.zero >= stage else num_bytes)

    def _get_weight_bytes(self, counts: Counts, trained_bytes: int) -> float:
        """Return the bytes of all weights and adapters, with `trained_bytes` per trained element."""
        element = self.plan.mix.compute_bytes
        per_weight = {"own": element, "int8": 1, "nf4": NF4_BYTES}[self.options.frozen_weights]
        trained = self._count_trained(counts)
        frozen = counts.rest + counts.adapters - trained
        return counts.frozen * per_weight + frozen * element + trained * trained_bytes

    def _get_master_bytes(self, counts: Counts) -> int:
        return FP32_BYTES * self._count_trained(counts) if self.plan.mix.has_master_weights else 0

    def _get_moment_bytes(self, counts: Counts) -> float:
        """Return the bytes of optimizer state without master weights."""
        trained, moment_bytes = self._count_trained(counts), self.plan.mix.moment_bytes
        match self.options.optimizer:
            case "adamw_8bit" | "paged_adamw_8bit":
                return 2 * trained * MOMENT_8BIT_BYTES
            case "adafactor":
                return counts.factors * FP32_BYTES
            case "muon":  # one momentum of each hidden matrix, AdamW for the rest
                return (trained - counts.matrices / 2) * moment_bytes
            case _:
                return trained * moment_bytes

    def _persistent(self, stage: int) -> Levels:
        """Return what stays from step to step: weights, optimizer state, and the weights that ZeRO gathers.

        As with FSDP2, the sharded weights of ZeRO are the fp32 master weights.
        """
        options, counts, zero, mix = self.options, self._count(stage), self.plan.layout.zero, self.plan.mix
        levels = [0] * len(PARTS)
        weights = self._get_weight_bytes(counts, mix.compute_bytes)
        gathered = counts.gathered * weights / (counts.frozen + counts.rest)
        is_on_gpu = options.offload == "none"
        if options.offload == "optimizer_and_parameters":
            levels[GATHERED] = round(gathered)
        elif zero == 3:
            held_bytes = mix.sharded_bytes if is_on_gpu else mix.compute_bytes
            levels[PARAMETERS] = self._shard(self._get_weight_bytes(counts, held_bytes))
            levels[GATHERED] = round(gathered)
        elif zero:
            levels[PARAMETERS] = self._shard(self._count_trained(counts) * mix.sharded_bytes) if is_on_gpu else 0
            levels[GATHERED] = round(weights)
        else:
            levels[PARAMETERS] = round(weights)
        if is_on_gpu:
            moments = 0 if options.optimizer == "paged_adamw_8bit" else self._get_moment_bytes(counts)
            levels[OPTIMIZER] = self._shard(moments + (0 if zero else self._get_master_bytes(counts)))
        if options.frozen_weights != "own":  # a matmul converts its matrix to the compute type
            levels[WORKING] = max(self._list_linear(stage), default=0) * mix.compute_bytes
        levels[ACTIVATIONS] = self.batch.rotary_bytes
        return tuple(levels)

    def _list_linear(self, stage: int) -> Iterator[int]:
        for unit in self.plan.partition.get_units(stage):
            yield from (_count_one(p) for p in unit.parameters if is_linear(p))

    def _full_gradients(self, stage: int) -> Levels:
        """Return the gradients at the end of the backward: all, or those of one unit if each is used at once."""
        options, mix, counts = self.options, self.plan.mix, self._count(stage)
        levels = [0] * len(PARTS)
        if options.lora_rank is None and (options.optimizer_in_backward or options.offload != "none"):
            levels[GRADIENTS] = counts.largest * mix.gradient_bytes
        else:
            levels[GRADIENTS] = self._shard(self._count_trained(counts) * mix.gradient_bytes, 2)
        if self.plan.layout.zero >= 2 and options.lora_rank is None:  # a reduce-scatter sends one unit
            levels[BUFFERS] = counts.largest * mix.gradient_bytes
        return tuple(levels)

    @cached_property
    def _layer_saves(self) -> int:
        return record_layer(self.batch, "keep", moe=self._has_experts, waits=False).forward.net_bytes

    @property
    def _has_experts(self) -> bool:
        return self.plan.model.moe is not None

    def _get_layer_saves(self, stage: int) -> int:
        """Return the most bytes that the layers of micro-batches in flight keep for backward."""
        chunks = self.get_rank(stage).kinds
        saves = [
            sum(
                count * record_layer(self.batch, "keep", moe=moe, waits=False).forward.net_bytes
                for moe, count in chunk.parameters.runs
            )
            for chunk in chunks
        ]
        flights = find_flights(self._get_schedule(stage), (stage,), self.plan.train.micro_batches)
        return max(1, max(sum(map(mul, saves, flight)) for flight in flights)) if flights else sum(saves)

    def _saved(self, stage: int, *, loss: bool) -> Levels:
        """Return the kept activations of all micro-batches in flight, including the current one."""
        levels = [0] * len(PARTS)
        current = sum(
            count * record_layer(self.batch, "keep", moe=moe, waits=False).forward.net_bytes
            for moe, count in self.get_rank(stage).chunks[-1].parameters.runs
        )
        saves = max(self._get_layer_saves(stage), current)
        if self.options.offload_activations:
            saves = min(saves, KEPT_LAYERS * self._layer_saves)
        levels[ACTIVATIONS] = saves
        return tuple(levels)

    @cached_property
    def _loss(self) -> Levels:
        head = record_head(self.batch, "keep", tied=False, waits=False)
        levels = list(join((head.forward, head.loss, head.loss_backward)).peak)
        if self.options.chunked_loss:
            levels[LOGITS] //= LOSS_CHUNKS
        levels[GRADIENTS] = 0
        return tuple(levels)

    @cached_property
    def _backward(self) -> Levels:
        layer: Stretch = record_layer(self.batch, "keep", moe=self._has_experts, waits=False).backward
        levels = list(layer.peak)
        if self.options.lora_rank:
            levels[GRADIENTS] = 0
        levels[WORKING] += self.batch.shard_bytes  # the gradient of the output
        return tuple(levels)

    @cached_property
    def _last_backward(self) -> Levels:
        levels = list(self._backward)
        levels[GRADIENTS] = 0
        levels[ACTIVATIONS] += self._layer_saves
        return tuple(levels)

    @staticmethod
    def _add(one: Levels, other: Levels) -> Levels:
        return tuple(a + b for a, b in zip(one, other, strict=True))


def is_linear(parameter: Parameter) -> bool:
    """Return whether a tensor is the weight of a linear layer inside a transformer layer."""
    inside = parameter.name.startswith(("attention.", "mlp.", "moe."))
    return inside and len(parameter.shape) > 1 and not is_router(parameter) and not is_vocabulary(parameter)


def _count_sides(parameter: Parameter) -> int:
    """Return rows plus columns of a matrix, or of all matrices of grouped experts."""
    *experts, rows, columns = parameter.shape
    return (experts[0] if experts else 1) * (rows + columns)


def _count_one(parameter: Parameter) -> int:
    """Return the elements of a matrix, or of one expert's matrix."""
    return parameter.shape[-1] * parameter.shape[-2]
