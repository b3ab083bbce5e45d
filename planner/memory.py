"""Bytes one rank needs, by component: an estimate from the shapes, in the order in which a step needs them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.activations import TRAINER_PRECISIONS, layer_activation_bytes, logit_bytes
from planner.models import Unit
from planner.precision import Mix, mix_of
from planner.schedules import chunks_in_flight
from planner.spec import JobSpec
from planner.traffic.data import shard_group
from planner.traffic.shapes import held, hidden_bytes, is_expert_unit, local_units, shard_rows

FRAGMENTATION = 0.05  # of what is allocated: an allowance
COMPONENTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")


def model_state(parameters: float, mix: Mix, *, zero: int, degree: int) -> float:
    """Bytes a rank keeps of weights, gradients and optimiser (ZeRO 1910.02054 figure 1, table 1).

    Stage 1 divides the optimiser over `degree` ranks, 2 the gradients too, 3 the weights too.
    """
    weights = mix.weights / (degree if zero == 3 else 1)
    gradients = mix.gradients / (degree if zero >= 2 else 1)
    return parameters * (weights + gradients + mix.optimizer / (degree if zero else 1))


def held_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage keeps between steps, after tp and ZeRO; the largest shard."""
    mix = mix_of(spec.train.precision)
    return state_bytes(spec, stage).weights // mix.weights


def updated_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements whose optimiser state a rank of the stage holds; the largest shard."""
    return sum(shard for _, shard in _units(spec, stage))


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by component on a rank of pipeline stage `stage`.

    In the trainer's precisions ZeRO shards weights, gradients and moments at rest; stages 1 and 2 also keep the
    gathered weights from the first forward to the last backward, stage 1 the whole gradients too, stage 3 two units at
    a time. Plain data parallelism keeps every bucket's flat copy of its gradients until the last all-reduce is done.
    With master weights apart (2104.04473, 1910.02054) each ZeRO stage shards what its definition says.
    """
    weights, gradients, optimizer, gathered = state_bytes(spec, stage)
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": gathered,
        "activations": activation_bytes(spec, stage),
        "logits": head_bytes(spec, stage),
    }


class State(NamedTuple):
    """Bytes of model state on one rank: what every micro-batch shares."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int


def state_bytes(spec: JobSpec, stage: int) -> State:
    """Model state of a rank of the stage, under the layout's ZeRO and precision."""
    mix = mix_of(spec.train.precision)
    units = _units(spec, stage)
    whole, shards = sum(numel for numel, _ in units), sum(shard for _, shard in units)
    largest = sorted(numel for numel, _ in units)[-2:]
    state = _sharded_at_rest if spec.train.precision in TRAINER_PRECISIONS else _master_apart
    return state(spec, mix, whole, shards, largest[-1], sum(largest))


def _sharded_at_rest(spec: JobSpec, mix: Mix, whole: int, shards: int, largest: int, two_largest: int) -> State:
    zero = spec.layout.zero
    buckets = whole if spec.layout.replica_ranks > 1 else 0
    passing = {0: buckets, 1: whole, 2: largest, 3: largest}[zero]
    gathered = {0: 0, 1: whole, 2: whole, 3: two_largest}[zero]
    gradients = (shards + passing) * mix.gradients
    return State(shards * mix.weights, gradients, shards * mix.optimizer, gathered * mix.compute)


def _master_apart(spec: JobSpec, mix: Mix, whole: int, shards: int, largest: int, two_largest: int) -> State:
    zero = spec.layout.zero
    weights = (shards if zero == 3 else whole) * mix.weights
    gradients = (min(whole, shards + largest) if zero >= 2 else whole) * mix.gradients
    optimizer = (shards if zero else whole) * mix.optimizer
    gathered = min(two_largest, whole - shards) if zero == 3 else 0  # a rank's own shard is not held twice
    return State(weights, gradients, optimizer, gathered * mix.weights)


def _units(spec: JobSpec, stage: int) -> list[tuple[int, int]]:
    """(elements, elements of the largest shard) of each unit."""
    layout = spec.layout
    degrees = {experts: shard_group(layout, experts=experts).size if layout.zero else 1 for experts in (False, True)}
    return [_unit_sizes(unit, degrees[is_expert_unit(unit)]) for unit in local_units(spec, stage)]


@cache
def _unit_sizes(unit: Unit, degree: int) -> tuple[int, int]:
    numel = sum(p.numel for p in unit.parameters)
    return numel, sum(shard_rows(p.shape[0], degree, 0) * (p.numel // p.shape[0]) for p in unit.parameters)


def activation_bytes(spec: JobSpec, stage: int) -> int:
    """Layers in flight, and under full recompute the working set of the one that is computed again."""
    own = held(spec, stage)
    dense = own.num_layers - own.num_moe_layers
    layers = dense * layer_activation_bytes(spec)
    if own.num_moe_layers:
        layers += own.num_moe_layers * layer_activation_bytes(spec, moe=True)
    chunks = len(own.stage.chunks)
    total = layers * chunks_in_flight(spec.layout, stage, spec.train.micro_batches) // chunks
    if spec.layout.recompute == "full":
        total += layer_activation_bytes(spec, moe=own.num_moe_layers > 0, recompute="none")
    return total


def head_bytes(spec: JobSpec, stage: int) -> int:
    """Logits, and the final norm's input and output, of the one micro-batch whose loss is computed."""
    own = held(spec, stage)
    if not own.stage.last:
        return 0
    return logit_bytes(spec) + 2 * hidden_bytes(spec)
