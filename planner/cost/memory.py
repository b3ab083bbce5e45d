"""Bytes one rank needs, by component: an estimate from the shapes, in the order in which a step needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from planner.cost.activations import inner_gradient_bytes, layer_activation_bytes, logit_bytes
from planner.cost.pipes import chunks_in_flight
from planner.facts.models import Unit
from planner.facts.placements import shard_group, shard_numel, vocab_rows
from planner.facts.precision import ADAM_MOMENT_BYTES, FP32_BYTES, Mix, mix_of
from planner.facts.shards import Held, held, hidden_bytes, is_expert_unit, local_units
from planner.facts.spec import JobSpec


def model_state(parameters: float, mix: Mix, *, zero: int, degree: int) -> float:
    """Bytes a rank keeps of weights, gradients and optimiser (ZeRO 1910.02054 figure 1, table 1).

    Stage 1 divides the optimiser over `degree` ranks, 2 the gradients too, 3 the weights too.
    """
    weights = mix.compute / (degree if zero == 3 else 1)
    gradients = mix.gradients / (degree if zero >= 2 else 1)
    return parameters * (weights + gradients + mix.optimizer / (degree if zero else 1))


def held_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage keeps and updates, after tp and ZeRO; the largest shard."""
    return sum(unit.shard for unit in _units(spec, stage))


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by component on a rank of pipeline stage `stage`, at the moment of a step when it holds most."""
    state = state_bytes(spec, stage)
    most = fullest_moment(spec, stage, state, sizes_of(spec))
    return {
        "parameters": state.weights,
        "gradients": most.gradients,
        "optimizer": state.optimizer,
        "gathered": most.gathered,
        "activations": most.activations,
        "working": most.working,
    }


class State(NamedTuple):
    """Bytes of model state on one rank, whatever the micro-batches.

    `gathered` from first to last: weights that ZeRO has gathered, `gathered_last` when the last backward ends.
    `gradients`: what a micro-batch leaves to the next; `sent`: copies of them. `table`: those of the embedding;
    `making_table`: those of one backward, which come as dense tensors at its end. `reducing`: what all gradients of
    ZeRO need when the last unit's are reduced, `reducing_first` when the first layer's are.
    """

    weights: int
    optimizer: int
    gathered: int
    gathered_last: int
    gradients: int
    sent: int
    table: int
    making_table: int
    reducing: int
    reducing_first: int

    @property
    def least(self) -> int:
        """What no choice of micro-batches or recompute can go below."""
        return self.weights + self.optimizer + (max(self.gathered, self.reducing) or self.gradients + self.sent)


def state_bytes(spec: JobSpec, stage: int) -> State:
    """Model state of a rank of the stage, under the layout's ZeRO and precision.

    ZeRO shards weights, gradients and moments, in fp32; stages 1 and 2 keep the gathered weights from the first forward
    to the last backward, stage 3 those of the ends, of two layers and the buffer of a third. Stage 1 keeps whole
    gradients until the last backward. Plain data parallelism copies every bucket of gradients to be sent.
    """
    mix, zero = mix_of(spec.train.precision), spec.layout.zero
    units, own = _units(spec, stage), held(spec, stage).stage
    whole, shards = sum(u.numel for u in units), sum(u.shard for u in units)
    table = vocab_rows(spec) * spec.model.hidden_size if own.first else 0
    # A tied table's two gradients of one backward are there beside their sum.
    making = (3 if spec.model.tied_embeddings and spec.layout.pp == 1 else 1) * table * mix.compute
    gradients = whole * mix.gradients
    if zero == 0:
        sent = gradients if spec.layout.replica_ranks > 1 else 0
        weights, optimizer = whole * mix.compute, whole * mix.optimizer
        return State(weights, optimizer, 0, 0, gradients, sent, table * mix.gradients, making, 0, 0)
    copies = 3 if spec.resources.device == "cpu" else 2  # gloo copies what it is given to reduce
    ends = sum(u.numel for u in units if u.is_end)
    layers = sorted(u.numel for u in units if not u.is_end)
    return State(
        weights=shards * FP32_BYTES,
        optimizer=shards * ADAM_MOMENT_BYTES,
        gathered=(ends + sum(layers[-3:]) if zero == 3 else whole) * mix.compute,
        gathered_last=ends * mix.compute,
        gradients=gradients if zero == 1 else shards * FP32_BYTES,
        sent=0,
        table=table * mix.gradients if zero == 1 else 0,
        making_table=making,
        reducing=shards * FP32_BYTES + max(copies * max(ends, layers[-1]) * mix.gradients, making),
        reducing_first=gradients + layers[-1] * mix.gradients if zero == 1 else 0,
    )


class Moment(NamedTuple):
    """Bytes that come and go within a step, at one moment of it."""

    name: str
    gradients: int
    gathered: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return _total(self)


class Sizes(NamedTuple):
    """Bytes of one micro-batch on whatever stage; "backward" is what a layer needs only while it runs its own."""

    dense: int
    moe: int
    message: int
    loss: int
    backward: int
    moe_backward: int


def sizes_of(spec: JobSpec) -> Sizes:
    """Under full recompute a layer's backward also needs all that the layer keeps when it has been computed again."""
    layout, hidden, has_moe = spec.layout, hidden_bytes(spec), spec.model.moe is not None
    full = layout.recompute == "full"

    def backward(*, moe: bool) -> int:
        again = layer_activation_bytes(spec, moe=moe, recompute="none") if full else 0
        return again + inner_gradient_bytes(spec, moe=moe) + hidden

    return Sizes(
        dense=layer_activation_bytes(spec),
        moe=layer_activation_bytes(spec, moe=True) if has_moe else 0,
        message=hidden // (layout.tp if layout.sequence_parallel else 1),
        loss=logit_bytes(spec) + 2 * hidden,
        backward=backward(moe=False),
        moe_backward=backward(moe=True) if has_moe else 0,
    )


def fullest_moment(spec: JobSpec, stage: int, state: State, sizes: Sizes) -> Moment:
    """Of a step's moments the one with most."""
    return max(_moments(spec, stage, state, sizes), key=_total)


def _total(moment: Moment) -> int:
    return moment.gradients + moment.gathered + moment.activations + moment.working


def _moments(spec: JobSpec, stage: int, state: State, sizes: Sizes) -> Iterator[Moment]:
    """A first backward finds no gradients yet; if it comes after the last forward, later ones find less in flight."""
    own, m = held(spec, stage), spec.train.micro_batches
    flight, chunks = chunks_in_flight(spec.layout, stage, m), len(own.stage.chunks)
    gradients, gathered = state.gradients, state.gathered
    working = sizes.moe_backward if own.num_moe_layers else sizes.backward
    if own.stage.last:
        working = max(working, sizes.loss)
    layers = (own.num_layers - own.num_moe_layers) * sizes.dense + own.num_moe_layers * sizes.moe
    messages = _messages(spec, own)
    kept = [layers * f // chunks + messages(f) * sizes.message if f > 0 else 0 for f in range(flight, flight - 3, -1)]
    if m * chunks > flight:
        yield Moment("when a backward begins", gradients, gathered, kept[0], working)
        yield Moment("when a backward ends", gradients + state.making_table, gathered, kept[1], 0)
    else:
        yield Moment("when the first backward begins", 0, gathered, kept[0], working)
        if flight > 1:
            made = gradients + state.making_table
            yield Moment("when the first backward ends", made - state.table, gathered, kept[1], 0)
            yield Moment("when the second backward begins", gradients, gathered, kept[1], working)
            yield Moment("when the second backward ends", made, gathered, kept[2], 0)
    if spec.layout.zero == 1 and m > 1:
        yield Moment("when gradients begin to be reduced", state.reducing_first, gathered, 0, 0)
    if spec.layout.zero:
        yield Moment("when the last backward ends", state.reducing, state.gathered_last, 0, 0)
        return
    # A table's first gradient is not added to any, and its bucket is the last to be copied.
    extra = state.making_table - (state.table if m == 1 else 0) - (state.table if state.sent else 0)
    yield Moment("when the last backward ends", gradients + state.sent + max(0, extra), 0, 0, 0)


class _Unit(NamedTuple):
    """Elements, those of the largest shard, and whether it holds an end of the model."""

    numel: int
    shard: int
    is_end: bool


def _units(spec: JobSpec, stage: int) -> list[_Unit]:
    layout = spec.layout
    degrees = {experts: shard_group(layout, experts=experts).size if layout.zero else 1 for experts in (False, True)}
    return [_unit_sizes(unit, degrees[is_expert_unit(unit)]) for unit in local_units(spec, stage)]


@cache
def _unit_sizes(unit: Unit, degree: int) -> _Unit:
    numel = sum(p.numel for p in unit.parameters)
    shard = sum(shard_numel(p, degree) for p in unit.parameters)
    return _Unit(numel, shard, unit.name == "root")


def _messages(spec: JobSpec, own: Held) -> Callable[[int], int]:
    """Messages kept with so many chunks in flight: outputs until their gradients come, and the next of each side."""
    if spec.layout.pp == 1:
        return lambda flight: 0
    sides = 2 - own.stage.first - own.stage.last
    keeps = not (own.stage.last and len(own.stage.chunks) == 1)
    return lambda flight: sides + keeps * flight
