"""Compute the layers and parameter units of each pipeline stage."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

from planner.facts.layout import get_chunk_indices, get_num_chunks
from planner.facts.model_shapes import Parameter, ParameterUnit, count_layer_weights, get_chunk_units, is_moe_layer
from planner.facts.placements import compute_local_parameter
from planner.facts.precision import get_mixed_precision
from planner.facts.resources import StackName
from planner.facts.spec import Balance, JobSpec, Layout, ModelSpec, Schedule

# Stacks that count the embedding and the head with its norm as one layer each, and give remaining layers to the first
# stages. Source: `pipe_partition_uniform` of Scaling. Its code of 2024 counts the norm separately, which contradicts
# its sweeps of 2023 on two stages.
STACKS_COUNTING_ENDS: frozenset[StackName] = frozenset(("scaling",))


class StageChunks(NamedTuple):
    """Layers of a pipeline stage: one range per chunk, and whether it has the ends."""

    chunks: tuple[range, ...]
    first: bool
    last: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.chunks))


def get_stage_chunks(model: ModelSpec, layout: Layout, index: int, stack: StackName = "ours") -> StageChunks:
    """Return the layers of pipeline rank `index`, as the stack splits them."""
    owners = [0] * get_num_chunks(layout)
    for stage in range(layout.pp):
        for chunk in get_chunk_indices(layout, stage):
            owners[chunk] = stage
    if layout.balance == "cost":
        runs = _split_by_cost(model.num_layers, tuple(owners), compute_head_cost(model))
    else:
        runs = _split_evenly(model.num_layers, len(owners), ends=stack in STACKS_COUNTING_ENDS)
    held = get_chunk_indices(layout, index)
    return StageChunks(tuple(runs[c] for c in held), first=0 in held, last=len(runs) - 1 in held)


def compute_head_cost(model: ModelSpec) -> float:
    """Return matmul weights of the head relative to a layer: V / (12 h) for gpt."""
    return model.vocab_size * model.hidden_size / count_layer_weights(model, moe=model.moe is not None)


@cache
def _split_evenly(num_layers: int, stages: int, *, ends: bool = False) -> list[range]:
    """Split layers evenly. The remaining layers go to the stages before the last.

    The last stage has the head, and the first stages have the most micro-batches in flight.

    Args:
        ends: Count embedding and head as layers, and give the remaining layers to the first stages.
    """
    if ends and num_layers + 2 >= 2 * stages > 2:
        share, rest = divmod(num_layers + 2, stages)
        sizes = [share + (i < rest) - (i in (0, stages - 1)) for i in range(stages)]
        return _build_ranges(sizes)
    share, rest = divmod(num_layers, stages)
    sizes = [share] * stages
    for i in range(rest):
        sizes[stages - 2 - i] += 1
    return _build_ranges(sizes)


@cache
def _split_by_cost(num_layers: int, owners: tuple[int, ...], head: float) -> list[range]:
    """Give each chunk a layer, and each next layer to the rank with the least work.

    Args:
        owners: Pipeline rank per chunk.
        head: Cost of the head in layers.
    """
    sizes = [1] * len(owners)
    loads = [0.0] * (max(owners) + 1)
    for owner in owners:
        loads[owner] += 1
    loads[owners[-1]] += head
    for _ in range(num_layers - len(owners)):
        chunk = min(range(len(owners)), key=lambda c: (loads[owners[c]], sizes[c], -c))
        sizes[chunk] += 1
        loads[owners[chunk]] += 1
    return _build_ranges(sizes)


def _build_ranges(sizes: list[int]) -> list[range]:
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


BUCKET_BYTES = 25 * 2**20  # Size at which a DDP bucket of gradients is all-reduced.


class StageLayers(NamedTuple):
    """Layers of a pipeline stage with their counts."""

    stage: StageChunks
    num_layers: int
    num_moe_layers: int


def get_stage_layers(spec: JobSpec, pp: int) -> StageLayers:
    """Return the layers of pipeline rank `pp`."""
    layout = spec.layout
    stack = spec.resources.stack
    return _get_stage_layers(spec.model, layout.pp, layout.virtual_stages, layout.schedule, layout.balance, stack, pp)


@cache
def _get_stage_layers(
    model: ModelSpec,
    pp: int,
    virtual_stages: int,
    schedule: Schedule,
    balance: Balance,
    stack: StackName,
    index: int,
) -> StageLayers:
    layout = Layout(pp=pp, virtual_stages=virtual_stages, schedule=schedule, balance=balance)
    stage = get_stage_chunks(model, layout, index, stack)
    num_moe = sum(is_moe_layer(model, i) for i in stage.layers) if model.moe else 0
    return StageLayers(stage, len(stage.layers), num_moe)


def count_tensors(spec: JobSpec, pp: int) -> int:
    """Return the number of parameter tensors of pipeline rank `pp`."""
    return sum(len(unit.parameters) for unit in get_local_units(spec, pp))


def get_micro_batch_tokens(spec: JobSpec) -> int:
    """Return the tokens of one micro-batch on one cp rank."""
    return spec.micro_batch_size * spec.train.seq_len // spec.layout.cp


def compute_hidden_bytes(spec: JobSpec) -> int:
    """Return bytes of a micro-batch's hidden states, (batch, seq/cp, hidden)."""
    return (
        get_micro_batch_tokens(spec) * spec.model.hidden_size * get_mixed_precision(spec.train.precision).compute_bytes
    )


def get_local_units(spec: JobSpec, pp: int) -> tuple[ParameterUnit, ...]:
    """Return the units of a stage after tp and ep, before data parallelism.

    With ep, the experts of a layer are a separate unit: fewer ranks sum their gradients.
    """
    layout = spec.layout
    return split_units(spec.model, get_stage_layers(spec, pp).stage, layout.tp, layout.ep)


@cache
def split_units(model: ModelSpec, stage: StageChunks, tp: int, ep: int) -> tuple[ParameterUnit, ...]:
    """Return `get_local_units` from the values that it depends on."""
    units: list[ParameterUnit] = []
    for unit in get_stage_units(model, stage):
        parts = _split_parameters(unit.parameters, model.num_kv_heads, tp, ep)
        if ep == 1:
            units.append(ParameterUnit(unit.name, parts))
            continue
        units.append(ParameterUnit(unit.name, tuple(p for p in parts if not p.is_expert)))
        if experts := tuple(p for p in parts if p.is_expert):
            units.append(ParameterUnit(f"{unit.name}.experts", experts))
    return tuple(units)


def count_equal_parameters(spec: JobSpec, pp: int) -> tuple[tuple[Parameter, int], ...]:
    """Return the tensors of `get_local_units`, each with the number of equal tensors."""
    layout = spec.layout
    return _count_equal_parameters(spec.model, get_stage_layers(spec, pp).stage, layout.tp, layout.ep)


@cache
def _count_equal_parameters(
    model: ModelSpec, stage: StageChunks, tp: int, ep: int
) -> tuple[tuple[Parameter, int], ...]:
    return tuple(Counter(p for unit in split_units(model, stage, tp, ep) for p in unit.parameters).items())


def get_stage_units(model: ModelSpec, stage: StageChunks) -> list[ParameterUnit]:
    """Return the unsharded units of each chunk in order.

    In a V, the embedding and the head are in the units of two chunks.
    """
    ends = len(stage.chunks) - 1
    return [
        unit
        for i, chunk in enumerate(stage.chunks)
        for unit in get_chunk_units(model, chunk, first=stage.first and i == 0, last=stage.last and i == ends)
    ]


@cache
def _split_parameters(parameters: tuple[Parameter, ...], num_kv_heads: int, tp: int, ep: int) -> tuple[Parameter, ...]:
    return tuple(compute_local_parameter(p, num_kv_heads, tp, ep) for p in parameters)


def is_expert_unit(unit: ParameterUnit) -> bool:
    """Return whether all tensors of a unit are experts that ep shards."""
    return unit.name.endswith(".experts")
