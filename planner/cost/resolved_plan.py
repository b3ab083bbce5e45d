"""A spec resolved once: process groups, pipeline stages, and tensor shards, each computed on first use.

`resolve` turns a spec into a `ResolvedPlan`, which the cost model passes down. Layouts that divide the model equally
share a `Partition`. Layouts whose ranks run equal micro-batches share a `MicroBatch`. Both see only a narrowed spec:
fields that do not belong to them have their defaults, so they cannot depend on a field outside their key.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property, lru_cache
from typing import Any

from contracts.telemetry.items import Axis
from planner.facts.layout import V_SCHEDULES, RankGroup, get_axis_group, get_shard_group, is_v_turn
from planner.facts.model_shapes import Parameter, ParameterUnit
from planner.facts.placements import get_vocab_rows
from planner.facts.precision import FP8_BYTES, MixedPrecision, get_mixed_precision
from planner.facts.resources import Device, Resources, StackName
from planner.facts.spec import JobSpec, Layout, ModelSpec, TrainSpec
from planner.facts.stages import (
    StageLayers,
    compute_hidden_bytes,
    count_equal_parameters,
    get_local_units,
    get_micro_batch_tokens,
    get_stage_layers,
)
from planner.hardware.stacks import STACKS

MAX_SHARED_PARTS = 4096  # partitions and micro-batches that a process remembers
# Fields of a layout that do not change which tensors a rank holds before ZeRO.
_OUTSIDE_PARTITION: dict[str, Any] = {
    "dp": 1,
    "cp": 1,
    "dp_replicas": 1,
    "zero": 0,
    "recompute": "none",
    "sequence_parallel": False,
    "regather": False,
    "keep_gathered": False,
    "scatter_gather": False,
    "cp_method": "ring",
}
# Fields of a layout that do not change what one rank computes of a layer with one micro-batch.
_OUTSIDE_MICRO_BATCH: dict[str, Any] = {
    "dp": 1,
    "pp": 1,
    "dp_replicas": 1,
    "keep_gathered": False,
    "scatter_gather": False,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "balance": "layers",
}


class Partition:
    """A model divided over pipeline stages, tensor ranks, and expert ranks."""

    def __init__(self, spec: JobSpec) -> None:
        self.model, self.layout = spec.model, spec.layout
        self._spec = spec
        self._units: dict[int, tuple[ParameterUnit, ...]] = {}
        self._parameters: dict[int, tuple[tuple[Parameter, int], ...]] = {}

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """The layers and ends of the model on each pipeline stage."""
        return tuple(get_stage_layers(self._spec, index) for index in range(self.layout.pp))

    @cached_property
    def equal_stages(self) -> tuple[tuple[int, ...], ...]:
        """All stages, grouped by equal shares of the model. Stages of a group cost the same."""
        dense = self.model.moe.dense_layers if self.model.moe else 0
        groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, own in enumerate(self.stages):
            stage = own.stage
            chunks = tuple((len(chunk), sum(layer >= dense for layer in chunk)) for chunk in stage.chunks)
            groups[chunks, stage.first, stage.last, is_v_turn(self.layout, index)].append(index)
        return tuple(map(tuple, groups.values()))

    def get_units(self, stage: int) -> tuple[ParameterUnit, ...]:
        """Return the FSDP units of a stage, with tensors divided by tp and ep."""
        if stage not in self._units:
            self._units[stage] = get_local_units(self._spec, stage)
        return self._units[stage]

    def count_parameters(self, stage: int) -> tuple[tuple[Parameter, int], ...]:
        """Return the different tensors of a stage, each with its number of copies."""
        if stage not in self._parameters:
            self._parameters[stage] = count_equal_parameters(self._spec, stage)
        return self._parameters[stage]

    def count_tensors(self, stage: int) -> int:
        """Return the number of parameter tensors of a stage."""
        return sum(number for _, number in self.count_parameters(stage))


class MicroBatch:
    """The work of one rank on one micro-batch of one layer. `spec` is narrowed to this work.

    Attributes:
        tokens: tokens of the rank's cp part of all sequences.
        element: bytes per element of the compute type.
        narrow: bytes per element of matmul operands.
        stages: collectives go through a copy, as with gloo.
    """

    def __init__(self, spec: JobSpec) -> None:
        layout, train, mix = spec.layout, spec.train, get_mixed_precision(spec.train.precision)
        self.spec, self.model, self.stack = spec, spec.model, STACKS[spec.resources.stack]
        self.tokens, self.sequences, self.seq_len = get_micro_batch_tokens(spec), spec.micro_batch_size, train.seq_len
        self.element = mix.compute_bytes
        self.narrow = FP8_BYTES if mix.gemm == "fp8" else mix.compute_bytes
        self.tp, self.cp, self.ep, self.ring = layout.tp, layout.cp, layout.ep, layout.cp_method == "ring"
        self.sequence_parallel, self.regather = layout.sequence_parallel, layout.regather
        self.recompute, self.attention, self.dropout = layout.recompute, train.attention, train.dropout
        self.has_documents = train.document_end is not None  # attention stays inside them
        self.fused_loss = self.stack.fused_loss or (self.stack.compiles_loss and train.compile)
        self.stages = spec.resources.device == "cpu"
        self.vocab_rows = get_vocab_rows(spec)
        self.num_shards = layout.tp if layout.sequence_parallel else 1  # of the residual stream
        self.hidden_bytes = compute_hidden_bytes(spec)  # hidden states between collectives, (batch, seq/cp, hidden)
        self.shard_bytes = self.hidden_bytes // self.num_shards  # hidden states of the residual stream
        selective, by_operation = layout.recompute == "selective", self.stack.recomputes_operations
        self.recomputes_operations = selective and by_operation
        # Backward recomputes only norms and activations if attention is fused.
        self.recomputes_light = selective and not by_operation and train.attention == "fused"

    def get_staging_bytes(self, num_bytes: int) -> int:
        """Return the bytes of the copy through which a collective sends `num_bytes`."""
        return num_bytes if self.stages else 0

    @property
    def rotary_bytes(self) -> int:
        """Cosines and sines of the positions, which a chunk computes once for all its layers."""
        if not self.model.has_rope or self.model.mla:
            return 0
        return self.tokens // self.sequences * self.model.head_size * self.element

    @property
    def embedding_elements(self) -> int:
        """Elements of the tables in which an embedding looks up its rows."""
        positions = self.model.max_seq_len if self.model.has_learned_positions else 0
        return (self.vocab_rows + positions) * self.model.hidden_size


class ResolvedPlan:
    """A spec with the facts that follow from it. Immutable: facts are computed once and kept."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.model, self.layout, self.train, self.resources = spec.model, spec.layout, spec.train, spec.resources
        self.micro_batch_size = spec.micro_batch_size
        self.mix: MixedPrecision = get_mixed_precision(spec.train.precision)
        self._groups: dict[str, RankGroup] = {}

    @cached_property
    def partition(self) -> Partition:
        """The model divided over stages, shared with layouts that divide it equally."""
        schedule = "zbv" if self.layout.schedule in V_SCHEDULES else "1f1b"
        layout = self.layout.model_copy(update={**_OUTSIDE_PARTITION, "schedule": schedule})
        return _get_partition(self.model, layout, self.resources.stack)

    @cached_property
    def micro_batch(self) -> MicroBatch:
        """The work of one rank on one micro-batch, shared with layouts that have equal work."""
        zero = 3 if self.layout.zero == 3 else 0  # ZeRO-3 launches more kernels per layer
        layout = self.layout.model_copy(update={**_OUTSIDE_MICRO_BATCH, "zero": zero})
        train = self.train.model_copy(update={"global_batch": self.micro_batch_size, "micro_batches": 1})
        return _get_micro_batch(self.model, layout, train, self.resources.device, self.resources.stack)

    @cached_property
    def shard_groups(self) -> tuple[RankGroup, RankGroup]:
        """The ranks over which ZeRO shards the layers, and the experts of an ep index."""
        return get_shard_group(self.layout, experts=False), get_shard_group(self.layout, experts=True)

    def get_group(self, axis: Axis) -> RankGroup:
        """Return the process group of an axis, or of `world`."""
        if axis not in self._groups:
            self._groups[axis] = get_axis_group(self.layout, axis)
        return self._groups[axis]


def resolve(spec: JobSpec | ResolvedPlan) -> ResolvedPlan:
    """Return the plan of a spec. A plan is returned unchanged."""
    return spec if isinstance(spec, ResolvedPlan) else ResolvedPlan(spec)


@lru_cache(maxsize=MAX_SHARED_PARTS)
def _get_partition(model: ModelSpec, layout: Layout, stack: StackName) -> Partition:
    return Partition(JobSpec(model=model, layout=layout, resources=Resources(stack=stack)))


@lru_cache(maxsize=MAX_SHARED_PARTS)
def _get_micro_batch(
    model: ModelSpec, layout: Layout, train: TrainSpec, device: Device, stack: StackName
) -> MicroBatch:
    resources = Resources(device=device, stack=stack)
    return MicroBatch(JobSpec(model=model, layout=layout, train=train, resources=resources))
