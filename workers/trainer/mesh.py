"""The process groups of one rank, one an axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from contracts.telemetry import Axis
from planner.layout import Coordinates, MeshAxis, axis_ranks, coordinates
from planner.spec import Layout

Label = Callable[[str, Axis], None]


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and whom it talks to. A group of one rank is None: nothing is ever sent on it.

    The two directions of the pipeline have a group each, so that on NCCL a send of one never waits behind a
    receive of the other. `embedding` joins the first and last stage when pp > 1.
    """

    layout: Layout
    rank: int
    place: Coordinates
    dp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        return self.place.pp == 0

    @property
    def is_last(self) -> bool:
        return self.place.pp == self.layout.pp - 1

    def stage_rank(self, stage: int) -> int:
        """Global rank of the same dp and tp coordinate on another stage."""
        return axis_ranks(self.rank, "pp", self.layout)[stage]


def make_mesh(layout: Layout, rank: int, label: Label) -> Mesh:
    """Create every group; all ranks call this with the same layout. `label(group name, axis)` tells the meter."""

    def own(
        axis: MeshAxis, pick: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ranks: ranks
    ) -> dist.ProcessGroup | None:
        if getattr(layout, axis) == 1:
            return None
        mine = None
        for ranks in sorted({pick(axis_ranks(r, axis, layout)) for r in range(layout.world_size)}):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mine = group
        if mine is not None:
            label(mine.group_name, axis)
        return mine

    return Mesh(
        layout=layout,
        rank=rank,
        place=coordinates(rank, layout),
        forward=own("pp"),
        backward=own("pp"),
        embedding=own("pp", lambda ranks: (ranks[0], ranks[-1])),
        dp=own("dp"),
        tp=own("tp"),
    )
