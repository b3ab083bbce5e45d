"""Map ranks to coordinates, communication groups, and pipeline chunks."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.spec import Layout

MeshAxis = Literal["pp", "dp", "cp", "tp"]
MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "cp", "tp")  # Outermost first. tp ranks are neighbors.
MAX_RANKS = 65536  # An estimate can have a row per rank.
V_SCHEDULES = ("zbv", "dualpipev")


class Coordinates(NamedTuple):
    """Coordinates of a rank on the device mesh."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


def get_coordinates(rank: int, layout: Layout) -> Coordinates:
    """Return the coordinates of a rank: the inverse of `get_rank`.

    Raises:
        ValueError: If the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0..{layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(pp, dp, cp, tp)


def get_rank(place: Coordinates, layout: Layout) -> int:
    """Return the rank at coordinates: ((pp * DP + dp) * CP + cp) * TP + tp."""
    return ((place.pp * layout.dp + place.dp) * layout.cp + place.cp) * layout.tp + place.tp


def get_axis_ranks(rank: int, axis: MeshAxis, layout: Layout) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` only in the coordinate of `axis`."""
    place = get_coordinates(rank, layout)
    return tuple(get_rank(place._replace(**{axis: i}), layout) for i in range(getattr(layout, axis)))


class RankGroup(NamedTuple):
    """Group of `size` ranks, each `stride` after the previous rank."""

    size: int
    stride: int


def get_group_ranks(rank: int, group: RankGroup) -> tuple[int, ...]:
    """Return the ranks of the group that contains `rank`, in order."""
    first = rank - rank // group.stride % group.size * group.stride
    return tuple(first + i * group.stride for i in range(group.size))


def get_axis_group(layout: Layout, axis: Literal["pp", "dp", "cp", "ep", "tp", "world"]) -> RankGroup:
    """Return the group of an axis. dp includes cp ranks, which have the same parameters."""
    stage = layout.tp * layout.cp * layout.dp
    return {
        "tp": RankGroup(layout.tp, 1),
        "cp": RankGroup(layout.cp, layout.tp),
        "ep": RankGroup(layout.ep, layout.tp),
        "dp": RankGroup(layout.replica_ranks, layout.tp),
        "pp": RankGroup(layout.pp, stage),
        "world": RankGroup(layout.world_size, 1),
    }[axis]


def get_num_chunks(layout: Layout) -> int:
    """Return the number of chunks of the model: virtual stages over all pipeline ranks."""
    return layout.pp * layout.virtual_stages


def is_v_turn(layout: Layout, stage: int) -> bool:
    """Return whether a stage has both chunks at the turn of a V, with no message between."""
    return layout.schedule in V_SCHEDULES and layout.virtual_stages == 2 and stage == layout.pp - 1


def get_chunk_indices(layout: Layout, stage: int) -> tuple[int, ...]:
    """Return the chunks of a pipeline rank.

    In a loop, the chunks are stage + i * pp. In a V, one chunk is on the way down and one on the way up.
    """
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


def get_shard_group(layout: Layout, *, experts: bool) -> RankGroup:
    """Return the ranks that ZeRO shards a tensor over.

    The group is dp x cp of one HSDP replica. For experts, it has only the ranks with one ep index.
    """
    ep = layout.ep if experts else 1
    return RankGroup(layout.shard_ranks // ep, layout.tp * ep)


LevelName = Literal["", "shards", "replicas", "shared", "experts"]
LevelAxis = Literal["dp", "pp", "cp", "ep", "tp", "world"]
AXES: tuple[LevelAxis, ...] = ("dp", "pp", "cp", "ep", "tp", "world")


class Level(NamedTuple):
    """Communication group of an axis. `name` is empty if the axis has only one group."""

    axis: LevelAxis
    name: LevelName
    group: RankGroup


def get_levels(layout: Layout) -> list[Level]:
    """Return all communication groups of two or more ranks.

    Most axes have one group. dp has two groups in two cases. HSDP (2304.11277 section 3.2.2) shards inside each
    replica and sums over the replicas. Experts that ep shards have fewer replicas than other parameters.
    """
    found = [level for axis in AXES for level in _get_axis_levels(layout, axis)]
    return [level for level in found if level.group.size > 1]


def get_level_name(layout: Layout, axis: str, op: str, group_size: int) -> LevelName:
    """Return the name of the dp group that a collective belongs to."""
    if axis != "dp":
        return ""
    if layout.dp_replicas > 1:
        return "replicas" if op == "all_reduce" else "shards"
    if layout.ep > 1:
        return "experts" if group_size * layout.ep == layout.replica_ranks else "shared"
    return ""


def _get_axis_levels(layout: Layout, axis: LevelAxis) -> list[Level]:
    whole = get_axis_group(layout, axis)
    if axis == "dp" and layout.dp_replicas > 1:
        shards = get_shard_group(layout, experts=False)
        copies = RankGroup(layout.dp_replicas, shards.stride * shards.size)
        return [Level(axis, "shards", shards), Level(axis, "replicas", copies)]
    if axis == "dp" and layout.ep > 1:
        experts = RankGroup(layout.replica_ranks // layout.ep, layout.tp * layout.ep)
        return [Level(axis, "shared", whole), Level(axis, "experts", experts)]
    return [Level(axis, "", whole)]
