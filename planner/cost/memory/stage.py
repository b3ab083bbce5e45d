"""One rank's step along its list of actions, and what it holds all the while."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import mul
from typing import NamedTuple

from planner.cost.memory.chunk import Chunk, Turn, effect
from planner.cost.memory.moments import Moment, Pipe, Species, flights_of, moments, moments_of
from planner.cost.memory.pieces import layer_piece
from planner.cost.memory.shape import shape_of
from planner.cost.memory.tape import (
    ACTIVATIONS,
    BUFFERS,
    COPIES,
    GRADIENTS,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    WORKING,
    Levels,
    Stretch,
    level,
    plus,
    times,
)
from planner.cost.memory.update import turned
from planner.cost.memory.zero import NO_UNIT, Sharding, Unit
from planner.facts.layout import get_shard_group
from planner.facts.model_shapes import ParameterUnit as Tensors
from planner.facts.model_shapes import is_moe_layer
from planner.facts.placements import compute_shard_numel, get_zero_shard
from planner.facts.precision import FP32_BYTES, MixedPrecision, get_mixed_precision
from planner.facts.schedules import splits_backward
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.stages import StageChunks, get_stage_layers, is_expert_unit, split_units
from planner.hardware.stacks import STACKS


class Sized(NamedTuple):
    """Levels and their sum."""

    levels: Levels
    num_bytes: int


def _sized(levels: Levels) -> Sized:
    return Sized(levels, sum(levels))


class Rank(NamedTuple):
    """What decides the memory of a rank: `held` from step to step, its chunks, which of them differ, and of which of
    these each is."""

    held: Sized
    chunks: tuple[Chunk, ...]
    kinds: tuple[Chunk, ...]
    kind_of: tuple[int, ...]
    message: int


def rank_of_stage(spec: JobSpec, stage: int) -> Rank:
    layout, train = spec.layout, spec.train
    own = get_stage_layers(spec, stage).stage
    degrees = tuple(get_shard_group(layout, experts=e).size if layout.zero else 1 for e in (False, True))
    undivided = get_shard_group(layout, experts=True).size == 1
    parts = _parts(spec.model, own, layout.tp, layout.ep, degrees, undivided)
    left = [layout.keep_gathered and part is not parts[-1] for part in parts]  # its backwards follow its forwards
    mix, whole, shards = get_mixed_precision(train.precision), sum(p.numel for p in parts), sum(p.shard for p in parts)
    held_bytes = [0] * len(NOTHING)
    held_bytes[PARAMETERS] = shards * mix.sharded_bytes if layout.zero else whole * mix.compute_bytes
    held_bytes[OPTIMIZER] = shards * mix.moment_bytes if layout.zero else whole * mix.optimizer_bytes
    if layout.zero and mix.has_master_weights:  # what FSDP2 does not shard has its fp32 apart, as all has without it
        alone = sum(part.alone for part in parts)
        held_bytes[PARAMETERS] -= alone * (mix.sharded_bytes - mix.compute_bytes)
        held_bytes[OPTIMIZER] += alone * mix.sharded_bytes
    if (
        STACKS[spec.resources.stack].keeps_both_gradients
        and mix.has_master_weights
        and mix.gradient_bytes > mix.compute_bytes
    ):
        held_bytes[GRADIENTS] = whole * mix.compute_bytes
    if train.checkpoint_every and spec.resources.device == "cpu":
        held_bytes[COPIES] = shards * (mix.sharded_bytes + mix.moment_bytes)
    shape = shape_of(spec)
    held_bytes[ACTIVATIONS] = shape.rotary_bytes * len(parts)
    sharding = Sharding(
        layout.zero, mix.compute_bytes, mix.gradient_bytes, mix.sharded_bytes, layout.keep_gathered, shape.stages
    )
    chunks = tuple(
        Chunk(
            shape=shape,
            runs=part.runs,
            first=part.first,
            last=part.last,
            dense=part.dense,
            moe=part.moe,
            root=part.root,
            sharding=sharding,
            master=mix.has_master_weights and mix.gradient_bytes == FP32_BYTES,
            sent=mix.gradient_bytes if layout.zero == 0 and layout.replica_ranks > 1 else 0,
            waits=splits_backward(layout),
            left=leaves,
        )
        for part, leaves in zip(parts, left, strict=True)
    )
    unlike = list(zip(parts, left, strict=True))
    kinds = tuple(dict.fromkeys(unlike))
    firsts = tuple(chunks[unlike.index(kind)] for kind in kinds)
    return Rank(_sized(tuple(held_bytes)), chunks, firsts, tuple(map(kinds.index, unlike)), shape.part_bytes)


class _Part(NamedTuple):
    """A chunk's parameters."""

    runs: tuple[tuple[bool, int], ...]
    first: bool
    last: bool
    dense: Unit
    moe: Unit
    root: Unit

    @property
    def numel(self) -> int:
        return sum((self.moe if moe else self.dense).numel * n for moe, n in self.runs) + self.root.numel + self.alone

    @property
    def alone(self) -> int:
        return sum(self.moe.alone * n for moe, n in self.runs if moe)

    @property
    def shard(self) -> int:
        return sum((self.moe if moe else self.dense).shard * n for moe, n in self.runs) + self.root.shard + self.alone


@cache
def _parts(
    model: ModelSpec, own: StageChunks, tp: int, ep: int, degrees: tuple[int, ...], alone: bool
) -> tuple[_Part, ...]:
    """`degrees`: ranks that share what is no expert, and what is. `alone`: no other rank has an expert's copy."""
    units, found = iter(split_units(model, own, tp, ep)), []
    ends = len(own.chunks) - 1

    def following() -> Unit:
        unit = next(units)
        return _unit(unit, degrees[is_expert_unit(unit)])

    for index, layers in enumerate(own.chunks):
        first, last = own.first and index == 0, own.last and index == ends
        by_kind = {False: NO_UNIT, True: NO_UNIT}
        kinds = [is_moe_layer(model, layer) for layer in layers]
        for moe in kinds:
            unit = following()
            if moe and ep > 1:
                experts = following()
                unit = unit._replace(alone=experts.numel) if alone else unit.joined(experts)
            by_kind[moe] = unit
        root = following() if first or last else NO_UNIT
        found.append(_Part(_runs(kinds), first, last, by_kind[False], by_kind[True], root))
    return tuple(found)


@cache
def _unit(unit: Tensors, degree: int) -> Unit:
    numel = sum(p.numel for p in unit.parameters)
    shard = sum(compute_shard_numel(p, degree) for p in unit.parameters)
    turned = [p.numel for p in unit.parameters if (found := get_zero_shard(p.shape, degree)) and found.dim]
    last, before, widest = unit.parameters[-1].numel, 0, 0
    for parameter in unit.parameters:  # each is let go when its copy is there
        before += parameter.numel
        widest = max(widest, before + parameter.numel)
    return Unit(numel, shard * degree, shard, last, turned=turned[-1] if turned else 0, widest=widest)


def _runs(kinds: list[bool]) -> tuple[tuple[bool, int], ...]:
    runs: list[tuple[bool, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = kind, runs[-1][1] + 1
        else:
            runs.append((kind, 1))
    return tuple(runs)


class Fullest(NamedTuple):
    """Levels by part at the highest moment of a step, and which it is, in words."""

    levels: Levels
    when: str


def fullest(spec: JobSpec, stage: int) -> Fullest:
    """When a rank of the stage holds most."""
    rank = rank_of_stage(spec, stage)
    costs, most, found = [_costs(chunk) for chunk in rank.kinds], 0, None
    for moment in moments(_pipe(spec, stage, rank), spec.train.micro_batches):
        total = _total(moment, costs, rank.message)
        if total > most:
            most, found = total, moment
    update = _update(spec, stage)
    if found is None or update.num_bytes > most:
        return Fullest(plus(rank.held.levels, update.levels), "in the update")
    return Fullest(plus(rank.held.levels, _levels(found, costs, rank.message)), found.words)


def most_bytes(spec: JobSpec, stages: tuple[int, ...], limit: int | None = None) -> int:
    """The sum of `fullest` on the fullest of `stages`, which hold alike; or what is surely beyond the `limit`."""
    rank = rank_of_stage(spec, stages[0])
    pipe, micro_batches = _pipe(spec, stages[0], rank), spec.train.micro_batches
    if limit is not None:
        kept = [_kept_bytes(chunk) for chunk in rank.kinds]
        most = max(sum(map(mul, kept, flight)) for flight in flights_of(pipe, stages, micro_batches))
        surely: int = rank.held.num_bytes + most
        if surely > limit:
            return surely
    costs = [_costs(chunk) for chunk in rank.kinds]
    most = _highest(moments_of(pipe, stages, micro_batches), costs, rank.message)
    return rank.held.num_bytes + max(most, _update(spec, stages[0]).num_bytes)


def _highest(several: Sequence[Moment], costs: list[_Costs], message: int) -> int:
    """The largest `_total`; neighbours mostly share their species and what has passed."""
    flights, waits = [c.flight.num_bytes for c in costs], [c.waiting.num_bytes for c in costs]
    most, begun, before = 0, 0, None
    for moment in several:
        if before is None or moment.species != before.species or moment.passed != before.passed:
            begun, before = _begun(moment, costs), moment
        level = begun + moment.messages * message
        most = max(most, level + sum(map(mul, flights, moment.flight)) + sum(map(mul, waits, moment.waiting)))
    return most


def _kept_bytes(chunk: Chunk) -> int:
    """What the layers of one in flight keep."""
    return sum(
        count * layer_piece(chunk.shape, "keep", moe=moe, waits=chunk.waits).forward.net_bytes
        for moe, count in chunk.runs
    )


def least_bytes(spec: JobSpec, stage: int) -> int:
    """What no choice of micro-batches or recompute can go below: state, and the gradients that an update needs."""
    rank, zero = rank_of_stage(spec, stage), bool(spec.layout.zero)
    mix = get_mixed_precision(spec.train.precision)
    element = mix.sharded_bytes if zero else mix.gradient_bytes
    return rank.held.num_bytes + sum(chunk.elements(shard=zero) for chunk in rank.chunks) * element


def gradient_bytes(spec: JobSpec, stage: int) -> int:
    """Of a step's gradients, once complete."""
    rank, mix = rank_of_stage(spec, stage), get_mixed_precision(spec.train.precision)
    if not spec.layout.zero:
        whole = sum(chunk.elements() for chunk in rank.chunks)
        return rank.held.levels[GRADIENTS] + whole * mix.gradient_bytes
    # FSDP2 has nothing of experts that no other rank holds, and reduces all else to shards.
    alone = sum(chunk.moe.alone * count for chunk in rank.chunks for moe, count in chunk.runs if moe)
    shards = sum(chunk.elements(shard=True) for chunk in rank.chunks)
    return (shards - alone) * mix.sharded_bytes + alone * mix.gradient_bytes


def _pipe(spec: JobSpec, stage: int, rank: Rank) -> Pipe:
    layout = spec.layout
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    left = any(chunk.left for chunk in rank.kinds)
    return Pipe(schedule, layout.pp, layout.virtual_stages, stage, rank.kind_of, left)


def _update(spec: JobSpec, stage: int) -> Sized:
    """Gradients, and those of them that an update turns into fp32 at a time; where it turns none it is no peak."""
    layout, mix = spec.layout, get_mixed_precision(spec.train.precision)
    if layout.zero or mix.gradient_bytes == mix.sharded_bytes:
        return Sized(NOTHING, 0)
    units = split_units(spec.model, get_stage_layers(spec, stage).stage, layout.tp, layout.ep)
    replicas = layout.replica_ranks
    found = turned(units, mix.gradient_bytes, summed=replicas > 1, experts_summed=replicas > layout.ep)
    return _sized(plus(level(GRADIENTS, found.came), level(BUFFERS, found.fp32)))


class _Costs:
    """Of one kind of chunk: what one in flight and one whose weights wait hold, and by species the highest level over
    where it begins and what it leaves over what others of its sort leave.

    What waits holds the gradient of the chunk's output, and the graph of its forward: so its input and that one's
    gradient stay, after the messages that they were have been let go.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        message = chunk.shape.part_bytes
        usual = {"F": Turn(False, False), "B": Turn(False, False)}
        if chunk.waits:
            usual["W"] = Turn(False, False)
        self._turns = usual
        self._usual = {kind: effect(chunk, kind, turn) for kind, turn in usual.items()}
        self.flight = _sized(self._usual["F"].net)
        left = plus(self.flight.levels, self._usual["B"].net)
        left = plus(left, level(ACTIVATIONS, message * ((not chunk.first) - (not chunk.last))))
        self.waiting = _sized(plus(left, level(WORKING, message * (not chunk.last))))
        self._stretches: dict[tuple[str, Turn], Stretch] = {}
        self._peaks: dict[Species, Sized] = {}
        self._passed: dict[Species, Sized] = {}

    def peak(self, species: Species) -> Sized:
        found = self._peaks.get(species)
        if found is None:
            found = self._peaks[species] = _sized(self._stretch(species).peak)
        return found

    def passed(self, species: Species) -> Sized:
        found = self._passed.get(species)
        if found is None:
            more = plus(self._stretch(species).net, times(self._usual[species.kind].net, -1))
            found = self._passed[species] = _sized(more)
        return found

    def _stretch(self, species: Species) -> Stretch:
        turn = Turn(*species[2:])
        if turn == self._turns[species.kind]:
            return self._usual[species.kind]
        found = self._stretches.get((species.kind, turn))
        if found is None:
            found = self._stretches[species.kind, turn] = effect(self._chunk, species.kind, turn)
        return found


@cache
def _costs(chunk: Chunk) -> _Costs:
    return _Costs(chunk)


def _begun(moment: Moment, costs: list[_Costs]) -> int:
    """What its species adds at most, and what has passed has left."""
    return costs[moment.species.chunk].peak(moment.species).num_bytes + sum(
        count * costs[species.chunk].passed(species).num_bytes for species, count in moment.passed
    )


def _total(moment: Moment, costs: list[_Costs], message: int) -> int:
    return _highest([moment], costs, message)


def _levels(moment: Moment, costs: list[_Costs], message: int) -> Levels:
    states, gradients = moment.twice
    found = plus(
        level(BUFFERS, (moment.messages + states + gradients) * message), level(ACTIVATIONS, -states * message)
    )
    found = plus(found, level(WORKING, -gradients * message))
    found = plus(found, costs[moment.species.chunk].peak(moment.species).levels)
    for cost, flight, waiting in zip(costs, moment.flight, moment.waiting, strict=True):
        found = plus(found, plus(times(cost.flight.levels, flight), times(cost.waiting.levels, waiting)))
    for species, count in moment.passed:
        found = plus(found, times(costs[species.chunk].passed(species).levels, count))
    return found


def model_state(parameters: float, mix: MixedPrecision, *, zero: int, degree: int) -> float:
    """Bytes a rank keeps of weights, gradients and optimiser (ZeRO 1910.02054 figure 1, table 1).

    Stage 1 divides the optimiser over `degree` ranks, 2 the gradients too, 3 the weights too.
    """
    weights = mix.compute_bytes / (degree if zero == 3 else 1)
    gradients = mix.gradient_bytes / (degree if zero >= 2 else 1)
    return parameters * (weights + gradients + mix.optimizer_bytes / (degree if zero else 1))


def computed_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage computes with, from step to step: under ZeRO-3 its shards."""
    return sum(chunk.elements(shard=spec.layout.zero == 3) for chunk in rank_of_stage(spec, stage).chunks)


def held_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage keeps and updates, after tp and ZeRO; the largest shard."""
    return sum(chunk.elements(shard=bool(spec.layout.zero)) for chunk in rank_of_stage(spec, stage).chunks)
