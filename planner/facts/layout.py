"""Ranks and coordinates, which layers a stage holds, and every rule a spec must keep across its fields.

The groups that an axis' traffic goes over: one an axis, but two where dp has two levels.

HSDP (2304.11277 section 3.2.2) shards inside each replica and sums over the replicas; experts divided by ep have fewer
replicas than the rest.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.spec import Layout

MeshAxis = Literal["pp", "dp", "cp", "tp"]
MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "cp", "tp")  # outermost first: tp ranks are neighbours
MAX_RANKS = 65536  # an estimate may have a row for each
V_SCHEDULES = ("zbv", "dualpipev")


class Coordinates(NamedTuple):
    """Place of a rank on the mesh."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """rank = ((pp * DP + dp) * CP + cp) * TP + tp, turned round.

    Raises:
        ValueError: when the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0..{layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(pp, dp, cp, tp)


def rank_of(place: Coordinates, layout: Layout) -> int:
    """The rank at a place; the inverse of `coordinates`."""
    return ((place.pp * layout.dp + place.dp) * layout.cp + place.cp) * layout.tp + place.tp


def axis_ranks(rank: int, axis: MeshAxis, layout: Layout) -> tuple[int, ...]:
    """The ranks that share every coordinate with `rank` but that of `axis`, in order."""
    place = coordinates(rank, layout)
    return tuple(rank_of(place._replace(**{axis: i}), layout) for i in range(getattr(layout, axis)))


class Group(NamedTuple):
    """Ranks that meet in a collective: `size` of them, each `stride` after the one before."""

    size: int
    stride: int


def members(rank: int, group: Group) -> tuple[int, ...]:
    """The ranks of the group that `rank` belongs to, in order."""
    first = rank - rank // group.stride % group.size * group.stride
    return tuple(first + i * group.stride for i in range(group.size))


def axis_group(layout: Layout, axis: Literal["pp", "dp", "cp", "ep", "tp", "world"]) -> Group:
    """The group of an axis. dp joins the cp ranks too: they hold the same parameters."""
    stage = layout.tp * layout.cp * layout.dp
    return {
        "tp": Group(layout.tp, 1),
        "cp": Group(layout.cp, layout.tp),
        "ep": Group(layout.ep, layout.tp),
        "dp": Group(layout.replica_ranks, layout.tp),
        "pp": Group(layout.pp, stage),
        "world": Group(layout.world_size, 1),
    }[axis]


def num_chunks(layout: Layout) -> int:
    """Parts the layers are cut into: virtual stages of all ranks of a pipe."""
    return layout.pp * layout.virtual_stages


def is_turn(layout: Layout, stage: int) -> bool:
    """Whether a rank holds both chunks at the bottom of a V, between which nothing travels."""
    return layout.schedule in V_SCHEDULES and layout.virtual_stages == 2 and stage == layout.pp - 1


def chunk_indices(layout: Layout, stage: int) -> tuple[int, ...]:
    """The virtual stages a pipeline rank holds: in a loop, stage + i * pp; in a V, one going down and one coming up."""
    if layout.schedule in V_SCHEDULES and layout.virtual_stages == 2:
        return (stage, 2 * layout.pp - 1 - stage)
    return tuple(stage + i * layout.pp for i in range(layout.virtual_stages))


SCHEDULE_NAMES = {
    "naive": "Naive",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "looped_bfs": "Looped BFS",
    "interleaved_zero_bubble": "Zero bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}


def shard_group(layout: Layout, *, experts: bool) -> Group:
    """Ranks that ZeRO divides a tensor over: dp x cp of one HSDP replica; for experts those of the same ep index."""
    ep = layout.ep if experts else 1
    return Group(layout.shard_ranks // ep, layout.tp * ep)


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
