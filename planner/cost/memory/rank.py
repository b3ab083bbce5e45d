"""The facts that decide the memory of a rank: its chunks, their parameters, and its persistent model state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, lru_cache
from itertools import groupby
from typing import NamedTuple

from planner.cost.memory.chunk import Chunk, ChunkParameters
from planner.cost.memory.tape import ACTIVATIONS, COPIES, GRADIENTS, OPTIMIZER, PARAMETERS, PARTS, Levels, pack
from planner.cost.memory.zero import NO_UNIT, Sharding, ZeroUnit
from planner.cost.resolved_plan import MAX_SHARED_PARTS, Partition, ResolvedPlan
from planner.facts.model_shapes import ParameterUnit, is_moe_layer
from planner.facts.placements import compute_shard_numel, get_zero_shard
from planner.facts.precision import FP32_BYTES
from planner.facts.schedules import splits_backward
from planner.facts.stages import is_expert_unit
from planner.hardware.stacks import STACKS


class Sized(NamedTuple):
    """Packed levels and their sum in bytes."""

    packed: int
    num_bytes: int


class Rank(NamedTuple):
    """The facts that decide the memory of a rank.

    Attributes:
        persistent: memory that stays from step to step.
        chunks: the chunks of the rank in order.
        kinds: the different ones among them.
        kind_of: the index in `kinds` of each chunk.
        message: bytes of one message between stages.
    """

    persistent: Sized
    chunks: tuple[Chunk, ...]
    kinds: tuple[Chunk, ...]
    kind_of: tuple[int, ...]
    message: int


class Peak(NamedTuple):
    """Bytes by part at the highest moment of a step, and that moment in words."""

    levels: Levels
    when: str


class StageMemory(ABC):
    """The memory of each pipeline stage of a plan."""

    def __init__(self, plan: ResolvedPlan) -> None:
        self.plan = plan
        self.batch = plan.micro_batch
        self._ranks: dict[int, Rank] = {}

    @abstractmethod
    def find_peak(self, stage: int) -> Peak:
        """Return the highest moment of a rank of the stage."""

    @abstractmethod
    def get_max_bytes(self, stages: tuple[int, ...], limit: int | None = None) -> int:
        """Return the peak of the fullest of `stages`, which hold equal parts of the model.

        A peak above `limit` may be returned too low, but never below the limit.
        """

    @abstractmethod
    def get_min_bytes(self, stage: int) -> int:
        """Return the bytes that any micro-batch size needs: model state and the gradients of an update."""

    @abstractmethod
    def get_gradient_bytes(self, stage: int) -> int:
        """Return the bytes of the complete gradients of a step."""

    @abstractmethod
    def get_layer_bytes(self, *, moe: bool = False) -> int:
        """Return the bytes that one layer keeps from a micro-batch's forward to its backward."""

    def count_held(self, stage: int) -> int:
        """Return the parameter elements that a rank keeps and updates, after tp and ZeRO; the largest shard."""
        return self.count_elements(stage, shard=bool(self.plan.layout.zero))

    def count_computed(self, stage: int) -> int:
        """Return the parameter elements that a rank keeps for compute; under ZeRO-3 its shards."""
        return self.count_elements(stage, shard=self.plan.layout.zero == 3)

    def count_elements(self, stage: int, *, shard: bool = False) -> int:
        """Return the parameter elements of a stage, or of one rank's shards."""
        return sum(chunk.parameters.count_elements(shard=shard) for chunk in self.get_rank(stage).chunks)

    def get_rank(self, stage: int) -> Rank:
        """Return what decides the memory of a rank of the stage."""
        if stage not in self._ranks:
            self._ranks[stage] = self._resolve_rank(stage)
        return self._ranks[stage]

    def _resolve_rank(self, stage: int) -> Rank:
        plan, layout, mix, batch = self.plan, self.plan.layout, self.plan.mix, self.batch
        degrees = tuple(group.size if layout.zero else 1 for group in plan.shard_groups)
        is_alone = plan.shard_groups[1].size == 1
        parameters = _divide_into_chunks(plan.partition, stage, degrees, is_alone, layout.keep_gathered)
        sharding = Sharding(
            layout.zero, mix.compute_bytes, mix.gradient_bytes, mix.sharded_bytes, layout.keep_gathered, batch.stages
        )
        kinds = tuple(
            Chunk(
                batch=batch,
                parameters=part,
                sharding=sharding,
                master=mix.has_master_weights and mix.gradient_bytes == FP32_BYTES,
                sent=mix.gradient_bytes if layout.zero == 0 and layout.replica_ranks > 1 else 0,
                waits=splits_backward(layout),
                left=is_left,
            )
            for part, is_left in parameters.kinds
        )
        chunks = tuple(kinds[kind] for kind in parameters.kind_of)
        return Rank(self._get_persistent(parameters), chunks, kinds, parameters.kind_of, batch.shard_bytes)

    def _get_persistent(self, parameters: _StageParameters) -> Sized:
        layout, train, mix = self.plan.layout, self.plan.train, self.plan.mix
        resources = self.plan.resources
        whole, shards = parameters.numel, parameters.shard
        levels = [0] * len(PARTS)
        levels[PARAMETERS] = shards * mix.sharded_bytes if layout.zero else whole * mix.compute_bytes
        levels[OPTIMIZER] = shards * mix.moment_bytes if layout.zero else whole * mix.optimizer_bytes
        if layout.zero and mix.has_master_weights:  # FSDP2 does not shard these experts: their fp32 master is separate
            levels[PARAMETERS] -= parameters.alone * (mix.sharded_bytes - mix.compute_bytes)
            levels[OPTIMIZER] += parameters.alone * mix.sharded_bytes
        if (
            STACKS[resources.stack].keeps_both_gradients
            and mix.has_master_weights
            and mix.gradient_bytes > mix.compute_bytes
        ):
            levels[GRADIENTS] = whole * mix.compute_bytes
        if train.checkpoint_every and resources.device == "cpu":
            levels[COPIES] = shards * (mix.sharded_bytes + mix.moment_bytes)
        levels[ACTIVATIONS] = self.batch.rotary_bytes * len(parameters.kind_of)
        return Sized(pack(levels), sum(levels))


class _StageParameters(NamedTuple):
    """The parameters of a stage's chunks.

    Attributes:
        kinds: the different chunks, each with whether the rank leaves it before its backward.
        kind_of: the index in `kinds` of each chunk.
        numel: elements of all chunks.
        shard: elements of one rank's shards.
        alone: elements of experts that no other rank holds.
    """

    kinds: tuple[tuple[ChunkParameters, bool], ...]
    kind_of: tuple[int, ...]
    numel: int
    shard: int
    alone: int


@lru_cache(maxsize=MAX_SHARED_PARTS)
def _divide_into_chunks(
    partition: Partition, stage: int, degrees: tuple[int, ...], is_alone: bool, keeps_gathered: bool
) -> _StageParameters:
    """Return the parameters of the chunks of a stage.

    Args:
        degrees: ranks that share the layers, and ranks that share the experts.
        is_alone: no other rank holds a copy of an expert.
        keeps_gathered: gathered weights stay until the rank turns to another chunk.
    """
    model, own, ep = partition.model, partition.stages[stage].stage, partition.layout.ep
    tensors = partition.get_units(stage)
    units, found = iter(tensors), []
    ends = len(own.chunks) - 1

    def get_next() -> ZeroUnit:
        unit = next(units)
        return _measure(unit, degrees[is_expert_unit(unit)])

    for index, layers in enumerate(own.chunks):
        first, last = own.first and index == 0, own.last and index == ends
        by_kind = {False: NO_UNIT, True: NO_UNIT}
        kinds = [is_moe_layer(model, layer) for layer in layers]
        for moe in kinds:
            unit = get_next()
            if moe and ep > 1:
                experts = get_next()
                unit = unit._replace(alone=experts.numel) if is_alone else unit.join(experts)
            by_kind[moe] = unit
        root = get_next() if first or last else NO_UNIT
        found.append(
            ChunkParameters(
                tuple((kind, len(list(run))) for kind, run in groupby(kinds)),
                first,
                last,
                by_kind[False],
                by_kind[True],
                root,
            )
        )
    # The backwards of the last chunk follow its forwards, so the rank does not leave it.
    pairs = [(part, keeps_gathered and index < ends) for index, part in enumerate(found)]
    different = tuple(dict.fromkeys(pairs))
    numel, shard = (sum(part.count_elements(shard=shard) for part in found) for shard in (False, True))
    alone = sum(part.alone for part in found)
    return _StageParameters(different, tuple(map(different.index, pairs)), numel, shard, alone)


@cache
def _measure(unit: ParameterUnit, degree: int) -> ZeroUnit:
    """Return the elements of a unit that ZeRO shards over `degree` ranks."""
    numel = sum(p.numel for p in unit.parameters)
    shard = sum(compute_shard_numel(p, degree) for p in unit.parameters)
    turned = [p.numel for p in unit.parameters if (found := get_zero_shard(p.shape, degree)) and found.dim]
    last, before, widest = unit.parameters[-1].numel, 0, 0
    for parameter in unit.parameters:  # each tensor is freed after its copy is made
        before += parameter.numel
        widest = max(widest, before + parameter.numel)
    return ZeroUnit(numel, shard * degree, shard, last, turned=turned[-1] if turned else 0, widest=widest)
