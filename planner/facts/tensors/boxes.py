"""Where the part of a tensor that a rank holds lies in the whole tensor: what a checkpoint needs to know."""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.facts.layout import Coordinates
from planner.facts.models.shapes import Parameter
from planner.facts.spec import JobSpec
from planner.facts.tensors.placements import Placement, placement, places


class Box(NamedTuple):
    """Offset and size by dim, in the whole tensor. Padding of the vocabulary lies in no box."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def filled(self) -> tuple[slice, ...]:
        """Where the box lies in the rank's own tensor, whose padding comes last."""
        return tuple(slice(size) for size in self.sizes)


def divided_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What tp and ep leave to a rank, before ZeRO. Ranks that share key/value heads have the same."""
    return _box(spec, place, parameter, placement(spec.model, spec.layout, parameter)._replace(zero=None))


def held_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What a rank keeps between steps: ZeRO leaves it a part of what tp and ep do. May be empty."""
    return _box(spec, place, parameter, placement(spec.model, spec.layout, parameter))


def _box(spec: JobSpec, place: Coordinates, parameter: Parameter, placed: Placement) -> Box:
    offsets, sizes = [0] * len(parameter.shape), list(parameter.shape)
    for shard, index in zip(placed, places(spec.layout, place, parameter), strict=True):
        if shard:
            held = shard.held(sizes[shard.dim], index)
            offsets[shard.dim] += held.start
            sizes[shard.dim] = len(held)
    return Box(tuple(offsets), tuple(sizes))
