"""Which layers each stage of a pipe holds."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

from planner.facts.layout import chunk_indices, num_chunks
from planner.facts.models.flops import layer_weights
from planner.facts.resources import StackName
from planner.facts.spec import Layout, ModelSpec

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
