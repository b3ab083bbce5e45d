"""Which layers each stage of a pipe holds.

What one rank holds and handles, as the axes' traffic needs it: shards of tensors, bytes of hidden states.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

from planner.facts.layout import chunk_indices, num_chunks
from planner.facts.model_shapes import Parameter, Unit, is_moe_layer, layer_weights, stage_units
from planner.facts.placements import local_shape
from planner.facts.precision import mix_of
from planner.facts.resources import StackName
from planner.facts.spec import Balance, JobSpec, Layout, ModelSpec, Schedule

# Software that divides a pipe as if the table and the head with its norm were a layer each, and gives what remains to
# the first stages (Scaling's `pipe_partition_uniform`; its code of 2024 counts the norm apart, with which its sweeps of
# 2023 do not agree on two stages).
COUNTS_ENDS: frozenset[StackName] = frozenset(("scaling",))


class Stage(NamedTuple):
    """What of the model a pipeline rank holds: a run of layers for each of its chunks, and the ends."""

    chunks: tuple[range, ...]
    first: bool
    last: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.chunks))


def stage_of(model: ModelSpec, layout: Layout, index: int, stack: StackName = "ours") -> Stage:
    """What pipeline rank `index` holds, as the stack divides."""
    owners = [0] * num_chunks(layout)
    for stage in range(layout.pp):
        for chunk in chunk_indices(layout, stage):
            owners[chunk] = stage
    if layout.balance == "cost":
        runs = _by_cost(model.num_layers, tuple(owners), head_layers(model))
    else:
        runs = _by_layers(model.num_layers, len(owners), ends=stack in COUNTS_ENDS)
    held = chunk_indices(layout, index)
    return Stage(tuple(runs[c] for c in held), first=0 in held, last=len(runs) - 1 in held)


def head_layers(model: ModelSpec) -> float:
    """The head's products over those of a layer: V / (12 h) for gpt."""
    return model.vocab_size * model.hidden_size / layer_weights(model, moe=model.moe is not None)


@cache
def _by_layers(num_layers: int, stages: int, *, ends: bool = False) -> list[range]:
    """Those that remain after an even division go to the stages before the last: the last bears the head, and the first
    ones keep the most micro-batches alive. `ends`: of table and head too, a layer each, and the rest to the first."""
    if ends and num_layers + 2 >= 2 * stages > 2:
        share, rest = divmod(num_layers + 2, stages)
        sizes = [share + (i < rest) - (i in (0, stages - 1)) for i in range(stages)]
        return _runs(sizes)
    share, rest = divmod(num_layers, stages)
    sizes = [share] * stages
    for i in range(rest):
        sizes[stages - 2 - i] += 1
    return _runs(sizes)


@cache
def _by_cost(num_layers: int, owners: tuple[int, ...], head: float) -> list[range]:
    """A layer each, and the next always to the rank that has least to compute; `owners` are ranks by chunk."""
    sizes = [1] * len(owners)
    loads = [0.0] * (max(owners) + 1)
    for owner in owners:
        loads[owner] += 1
    loads[owners[-1]] += head
    for _ in range(num_layers - len(owners)):
        chunk = min(range(len(owners)), key=lambda c: (loads[owners[c]], sizes[c], -c))
        sizes[chunk] += 1
        loads[owners[chunk]] += 1
    return _runs(sizes)


def _runs(sizes: list[int]) -> list[range]:
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


BUCKET_BYTES = 25 * 2**20  # a bucket of gradients that are all-reduced together is closed once it holds this much


class Held(NamedTuple):
    """A rank's part of the model, as its traffic sees it."""

    stage: Stage
    num_layers: int
    num_moe_layers: int


def held(spec: JobSpec, pp: int) -> Held:
    """What pipeline rank `pp` holds."""
    layout = spec.layout
    stack = spec.resources.stack
    return _held(spec.model, layout.pp, layout.virtual_stages, layout.schedule, layout.balance, stack, pp)


@cache
def _held(
    model: ModelSpec,
    pp: int,
    virtual_stages: int,
    schedule: Schedule,
    balance: Balance,
    stack: StackName,
    index: int,
) -> Held:
    layout = Layout(pp=pp, virtual_stages=virtual_stages, schedule=schedule, balance=balance)
    stage = stage_of(model, layout, index, stack)
    num_moe = sum(is_moe_layer(model, i) for i in stage.layers) if model.moe else 0
    return Held(stage, len(stage.layers), num_moe)


def num_tensors(spec: JobSpec, pp: int) -> int:
    """Parameters of pipeline rank `pp`, whole ones or shards."""
    return sum(len(unit.parameters) for unit in local_units(spec, pp))


def micro_batch_tokens(spec: JobSpec) -> int:
    """Tokens of one micro-batch that this rank's cp part holds."""
    return spec.micro_batch_size * spec.train.seq_len // spec.layout.cp


def hidden_bytes(spec: JobSpec) -> int:
    """One micro-batch's hidden states, (batch, seq/cp, hidden) in the compute type."""
    return micro_batch_tokens(spec) * spec.model.hidden_size * mix_of(spec.train.precision).compute


def local_units(spec: JobSpec, pp: int) -> tuple[Unit, ...]:
    """The units of a stage with tensors divided by tp and ep, as data parallelism meets them.

    With ep, a layer's experts are a unit of their own: their gradients are summed over fewer ranks.
    """
    layout = spec.layout
    return divided_units(spec.model, held(spec, pp).stage, layout.tp, layout.ep)


@cache
def divided_units(model: ModelSpec, stage: Stage, tp: int, ep: int) -> tuple[Unit, ...]:
    """`local_units` of what it depends on."""
    units: list[Unit] = []
    for unit in held_units(model, stage):
        parts = _local(unit.parameters, model.num_kv_heads, tp, ep)
        if ep == 1:
            units.append(Unit(unit.name, parts))
            continue
        units.append(Unit(unit.name, tuple(p for p in parts if not p.is_expert)))
        if experts := tuple(p for p in parts if p.is_expert):
            units.append(Unit(f"{unit.name}.experts", experts))
    return tuple(units)


def alike_parameters(spec: JobSpec, pp: int) -> tuple[tuple[Parameter, int], ...]:
    """The tensors of `local_units`, each with how many layers hold one like it."""
    layout = spec.layout
    return _alike_parameters(spec.model, held(spec, pp).stage, layout.tp, layout.ep)


@cache
def _alike_parameters(model: ModelSpec, stage: Stage, tp: int, ep: int) -> tuple[tuple[Parameter, int], ...]:
    return tuple(Counter(p for unit in divided_units(model, stage, tp, ep) for p in unit.parameters).items())


def held_units(model: ModelSpec, stage: Stage) -> list[Unit]:
    """The units of each chunk in turn, whole tensors. The embedding and the head of a V are units of two chunks."""
    ends = len(stage.chunks) - 1
    return [
        unit
        for i, chunk in enumerate(stage.chunks)
        for unit in stage_units(model, chunk, first=stage.first and i == 0, last=stage.last and i == ends)
    ]


@cache
def _local(parameters: tuple[Parameter, ...], num_kv_heads: int, tp: int, ep: int) -> tuple[Parameter, ...]:
    return tuple(local_shape(p, num_kv_heads, tp, ep) for p in parameters)


def is_expert_unit(unit: Unit) -> bool:
    """Whether all of a unit's tensors are experts divided by ep."""
    return unit.name.endswith(".experts")
