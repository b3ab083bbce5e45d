"""The process groups of one rank, one an axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from contracts.telemetry.vocabulary import Axis
from planner.facts.layout import (
    Coordinates,
    RankGroup,
    get_axis_group,
    get_axis_ranks,
    get_coordinates,
    get_group_ranks,
    get_shard_group,
)
from planner.facts.placements import count_kv_replicas
from planner.facts.spec import JobSpec, Layout
from workers.rank_environment import get_group_timeout
from workers.torch_private.groups import connect

Label = Callable[[str, Axis], None]


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands and whom it talks to. A group of one rank is None: nothing is ever sent on it.

    `replicas` hold the same parameters but for ZeRO (dp x cp), `shards` those that ZeRO divides model state over and
    `copies` the same shard of each HSDP replica; `expert_*` are the same for experts that ep divides. `key_values`
    share key/value heads within tp. `forward` joins stages for messages to a later rank of the pipe and `backward` to
    an earlier one, so that on NCCL no send ever waits behind a receive; each two stages have a communicator of their
    own there. `embedding` joins the first and last stage.
    """

    layout: Layout
    rank: int
    place: Coordinates
    tp: dist.ProcessGroup | None
    key_values: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None
    expert_replicas: dist.ProcessGroup | None
    expert_shards: dist.ProcessGroup | None
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None

    @property
    def pipe(self) -> tuple[int, ...]:
        """Global ranks of the same coordinates on every stage."""
        return get_axis_ranks(self.rank, "pp", self.layout)


def make_mesh(spec: JobSpec, rank: int, label: Label) -> Mesh:
    """Create this rank's groups; all ranks call this with the same spec. `label(group name, axis)` tells the meter."""
    layout = spec.layout

    def make(axis: Axis, ranks: tuple[int, ...], *, messages: bool = False) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        # Only the members meet: a rank of a large world makes a dozen groups, not all of everybody's.
        group = dist.new_group(list(ranks), timeout=get_group_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        label(group.group_name, axis)
        if not messages:
            connect(group)
        return group

    def own(axis: Axis, group: RankGroup) -> dist.ProcessGroup | None:
        return make(axis, get_group_ranks(rank, group))

    pipe = get_group_ranks(rank, get_axis_group(layout, "pp"))
    ends = tuple(sorted({pipe[0], pipe[-1]}))
    replicas = RankGroup(layout.replica_ranks, layout.tp)
    shards = get_shard_group(layout, experts=False)
    experts = RankGroup(layout.replica_ranks // layout.ep, layout.tp * layout.ep) if layout.ep > 1 else RankGroup(1, 1)
    tp, dp = own("tp", get_axis_group(layout, "tp")), own("dp", replicas)
    hsdp = layout.dp_replicas > 1
    return Mesh(
        layout=layout,
        rank=rank,
        place=get_coordinates(rank, layout),
        tp=tp,
        key_values=own("tp", RankGroup(count_kv_replicas(spec.model.num_kv_heads, layout.tp), 1)),
        cp=own("cp", get_axis_group(layout, "cp")),
        ep=own("ep", get_axis_group(layout, "ep")),
        replicas=dp,
        shards=own("dp", shards) if hsdp else dp,
        copies=own("dp", RankGroup(layout.dp_replicas, shards.stride * shards.size)) if hsdp else None,
        expert_replicas=(expert_dp := own("dp", experts)),
        expert_shards=expert_dp,
        forward=make("pp", pipe, messages=True),
        backward=make("pp", pipe, messages=True),
        embedding=make("pp", ends) if rank in ends else None,
    )
