"""Bytes one rank needs, by component: an estimate from the shapes, in the order in which a step needs them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.activations import inner_gradient_bytes, layer_activation_bytes, logit_bytes
from planner.models import Unit
from planner.precision import ADAM_MOMENT_BYTES, FP32_BYTES, Mix, mix_of
from planner.schedules import chunks_in_flight
from planner.spec import JobSpec
from planner.traffic.data import shard_group
from planner.traffic.shapes import held, hidden_bytes, is_expert_unit, local_units, shard_rows

FRAGMENTATION = 0.05  # of what is allocated: an allowance


def model_state(parameters: float, mix: Mix, *, zero: int, degree: int) -> float:
    """Bytes a rank keeps of weights, gradients and optimiser (ZeRO 1910.02054 figure 1, table 1).

    Stage 1 divides the optimiser over `degree` ranks, 2 the gradients too, 3 the weights too.
    """
    weights = mix.compute / (degree if zero == 3 else 1)
    gradients = mix.gradients / (degree if zero >= 2 else 1)
    return parameters * (weights + gradients + mix.optimizer / (degree if zero else 1))


def held_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage keeps and updates, after tp and ZeRO; the largest shard."""
    return sum(shard for _, shard in _units(spec, stage))


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by component on a rank of pipeline stage `stage`, at the moment of a step when it holds most."""
    state = state_bytes(spec, stage)
    most = fullest_moment(spec, stage, state)
    return {
        "parameters": state.weights,
        "gradients": most.gradients,
        "optimizer": state.optimizer,
        "gathered": state.gathered,
        "activations": most.activations,
        "working": most.working,
    }


class State(NamedTuple):
    """Bytes of model state on one rank: what every micro-batch shares.

    `gradients` are those that one micro-batch leaves to the next, `at_the_end` the most there are of them when the last
    backward is done and they are reduced.
    """

    weights: int
    optimizer: int
    gathered: int
    gradients: int
    at_the_end: int

    @property
    def throughout(self) -> int:
        """What is there in forward and backward."""
        return self.weights + self.optimizer + self.gathered


def state_bytes(spec: JobSpec, stage: int) -> State:
    """Model state of a rank of the stage, under the layout's ZeRO and precision.

    ZeRO shards weights, gradients and moments, in fp32; stages 1 and 2 keep the gathered weights from the first forward
    to the last backward, stage 3 those of the ends, of two layers and the buffer of a third. Stage 1 keeps whole
    gradients until the last backward. Plain data parallelism copies every bucket of gradients to be sent.
    """
    mix, zero = mix_of(spec.train.precision), spec.layout.zero
    units = _units(spec, stage)
    whole, shards = sum(numel for numel, _ in units), sum(shard for _, shard in units)
    gradients = whole * mix.gradients
    if zero == 0:
        sent = gradients if spec.layout.replica_ranks > 1 else 0
        return State(whole * mix.compute, whole * mix.optimizer, 0, gradients, gradients + sent)
    largest = max(numel for numel, _ in units)
    reducing = shards * FP32_BYTES + 2 * largest * mix.gradients  # a unit's gradients, and their copy to be sent
    if zero == 1:
        reducing = max(reducing, gradients + largest * mix.gradients)
    kept = gradients if zero == 1 else shards * FP32_BYTES
    gathered = (_gathered_by_turns(spec, stage) if zero == 3 else whole) * mix.compute
    return State(shards * FP32_BYTES, shards * ADAM_MOMENT_BYTES, gathered, kept, reducing)


def _gathered_by_turns(spec: JobSpec, stage: int) -> int:
    """Elements: the ends' stay for as long as a backward lasts."""
    units = local_units(spec, stage)
    sizes = sorted(sum(p.numel for p in unit.parameters) for unit in units if unit.name != "root")
    ends = sum(p.numel for unit in units if unit.name == "root" for p in unit.parameters)
    return min(ends + sum(sizes[-3:]), ends + sum(sizes) + sizes[-1])


class Moment(NamedTuple):
    """Bytes that come and go within a step, at one moment of it."""

    name: str
    gradients: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.working


def fullest_moment(spec: JobSpec, stage: int, state: State) -> Moment:
    """Of a step's moments the one with most: a backward begins with all in flight, or the last one has ended.

    A first backward finds no gradients yet; where it comes after the last forward, later ones find less in flight.
    """
    own, train = held(spec, stage), spec.train
    flight, chunks = chunks_in_flight(spec.layout, stage, train.micro_batches), len(own.stage.chunks)
    working = working_bytes(spec, stage)
    end = Moment("when the last backward has ended", state.at_the_end, 0, 0)
    in_flight = activation_bytes(spec, stage, flight)
    if train.micro_batches * chunks > flight:
        return max(Moment("when a backward begins", state.gradients, in_flight, working), end, key=_total)
    first = Moment("when the first backward begins", 0, in_flight, working)
    fewer = activation_bytes(spec, stage, flight - 1)
    later = Moment("when the second backward begins", state.gradients, fewer, working if flight > 1 else 0)
    return max(first, later, end, key=_total)


def _total(moment: Moment) -> int:
    return moment.total


def _units(spec: JobSpec, stage: int) -> list[tuple[int, int]]:
    """(elements, elements of the largest shard) of each unit."""
    layout = spec.layout
    degrees = {experts: shard_group(layout, experts=experts).size if layout.zero else 1 for experts in (False, True)}
    return [_unit_sizes(unit, degrees[is_expert_unit(unit)]) for unit in local_units(spec, stage)]


@cache
def _unit_sizes(unit: Unit, degree: int) -> tuple[int, int]:
    numel = sum(p.numel for p in unit.parameters)
    return numel, sum(shard_rows(p.shape[0], degree, 0) * (p.numel // p.shape[0]) for p in unit.parameters)


def activation_bytes(spec: JobSpec, stage: int, flight: int) -> int:
    """What `flight` chunks of one micro-batch each keep for their backward, and for the stages beside this one."""
    own = held(spec, stage)
    dense = own.num_layers - own.num_moe_layers
    layers = dense * layer_activation_bytes(spec)
    if own.num_moe_layers:
        layers += own.num_moe_layers * layer_activation_bytes(spec, moe=True)
    return layers * flight // len(own.stage.chunks) + boundary_bytes(spec, stage, flight)


def boundary_bytes(spec: JobSpec, stage: int, flight: int) -> int:
    """Outputs kept until their gradients come, and a buffer for the next message from either side."""
    own, layout = held(spec, stage), spec.layout
    if layout.pp == 1:
        return 0
    sides = 2 - own.stage.first - own.stage.last
    outputs = 0 if own.stage.last and len(own.stage.chunks) == 1 else flight
    return (outputs + sides) * hidden_bytes(spec) // (layout.tp if layout.sequence_parallel else 1)


def working_bytes(spec: JobSpec, stage: int) -> int:
    """What a backward that begins needs at once: for the loss the logits, else a layer's gradients.

    Under full recompute also all that the layer keeps when it has been computed again.
    """
    own = held(spec, stage)
    again = 0
    if spec.layout.recompute == "full":
        again = layer_activation_bytes(spec, moe=own.num_moe_layers > 0, recompute="none")
    backward = inner_gradient_bytes(spec, moe=own.num_moe_layers > 0) + hidden_bytes(spec)
    if not own.stage.last:
        return again + backward
    return max(logit_bytes(spec) + 2 * hidden_bytes(spec), again + backward)
