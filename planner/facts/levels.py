"""The groups that an axis' traffic goes over: one an axis, but two where dp has two levels.

HSDP (2304.11277 section 3.2.2) shards inside each replica and sums over the replicas; experts divided by ep have fewer
replicas than the rest.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.layout import Group, axis_group
from planner.facts.spec import Layout
from planner.facts.tensors.placements import shard_group

LevelName = Literal["", "shards", "replicas", "shared", "experts"]
LevelAxis = Literal["dp", "pp", "cp", "ep", "tp", "world"]
AXES: tuple[LevelAxis, ...] = ("dp", "pp", "cp", "ep", "tp", "world")


class Level(NamedTuple):
    """`name` is empty where it is all of the axis."""

    axis: LevelAxis
    name: LevelName
    group: Group


def levels(layout: Layout) -> list[Level]:
    """Those of several ranks."""
    found = [level for axis in AXES for level in _of_axis(layout, axis)]
    return [level for level in found if level.group.size > 1]


def level_of(layout: Layout, axis: str, op: str, group_size: int) -> LevelName:
    """Which level of its axis a collective belongs to."""
    if axis != "dp":
        return ""
    if layout.dp_replicas > 1:
        return "replicas" if op == "all_reduce" else "shards"
    if layout.ep > 1:
        return "experts" if group_size * layout.ep == layout.replica_ranks else "shared"
    return ""


def _of_axis(layout: Layout, axis: LevelAxis) -> list[Level]:
    whole = axis_group(layout, axis)
    if axis == "dp" and layout.dp_replicas > 1:
        shards = shard_group(layout, experts=False)
        copies = Group(layout.dp_replicas, shards.stride * shards.size)
        return [Level(axis, "shards", shards), Level(axis, "replicas", copies)]
    if axis == "dp" and layout.ep > 1:
        experts = Group(layout.replica_ranks // layout.ep, layout.tp * layout.ep)
        return [Level(axis, "shared", whole), Level(axis, "experts", experts)]
    return [Level(axis, "", whole)]
