"""Where the part of a tensor that a rank holds lies in the whole tensor: what a checkpoint needs to know."""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.facts.layout import Coordinates
from planner.facts.models import Parameter, is_key_or_value
from planner.facts.shards import shard_group, shard_rows
from planner.facts.spec import JobSpec


class Box(NamedTuple):
    """Offset and size by dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def divided_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What tp and ep leave to a rank, before ZeRO. Ranks that share key/value heads have the same."""
    layout = spec.layout
    box = Box((0,) * len(parameter.shape), parameter.shape)
    if parameter.is_expert:
        box = _part(box, 0, layout.ep, (place.dp * layout.cp + place.cp) % layout.ep)
    if parameter.tp_dim is None:
        return box
    parts, index = layout.tp, place.tp
    if is_key_or_value(parameter) and layout.tp > spec.model.num_kv_heads:
        parts, index = spec.model.num_kv_heads, place.tp * spec.model.num_kv_heads // layout.tp
    return _part(box, parameter.tp_dim, parts, index)


def held_box(spec: JobSpec, place: Coordinates, parameter: Parameter) -> Box:
    """What a rank keeps between steps: ZeRO leaves it some rows of what tp and ep do. May be empty."""
    box = divided_box(spec, place, parameter)
    layout = spec.layout
    if not layout.zero:
        return box
    replica = place.dp * layout.cp + place.cp
    expert = parameter.is_expert and layout.ep > 1
    degree = shard_group(layout, experts=expert).size
    index = (replica // layout.ep if expert else replica) % degree
    rows = box.sizes[0]
    start = min(rows, index * -(-rows // degree))
    return Box((box.offsets[0] + start, *box.offsets[1:]), (shard_rows(rows, degree, index), *box.sizes[1:]))


def _part(box: Box, dim: int, parts: int, index: int) -> Box:
    size = box.sizes[dim] // parts
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += index * size
    sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))
