"""Process groups of one rank, one per axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from contracts.telemetry.items import Axis
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

LabelGroup = Callable[[str, Axis], None]


@dataclass(frozen=True)
class Mesh:
    """Store the coordinates and the process groups of this rank. A group of one rank is None.

    `replicas` hold the same parameters without ZeRO (dp x cp). `shards` share the model state of ZeRO, and
    `hsdp_replicas` hold the same shard in each HSDP replica. `expert_*` are the groups of experts that ep shards.
    `key_values` share key/value heads within tp. `pp_forward` has messages to later stages, and `pp_backward` has
    messages to earlier stages, so that on NCCL no send waits for a receive. `embedding` joins the first and last stage.
    """

    layout: Layout
    rank: int
    coordinates: Coordinates
    tp: dist.ProcessGroup | None
    key_values: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None
    ep: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    hsdp_replicas: dist.ProcessGroup | None
    expert_replicas: dist.ProcessGroup | None
    expert_shards: dist.ProcessGroup | None
    pp_forward: dist.ProcessGroup | None
    pp_backward: dist.ProcessGroup | None
    embedding: dist.ProcessGroup | None

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Return the global ranks with the same coordinates on every stage."""
        return get_axis_ranks(self.rank, "pp", self.layout)


def build_mesh(spec: JobSpec, rank: int, label: LabelGroup) -> Mesh:
    """Create the groups of this rank. All ranks call this with the same spec.

    `label(group name, axis)` names the group for the meter.
    """
    layout = spec.layout

    def make(axis: Axis, ranks: tuple[int, ...], *, messages: bool = False) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        # Only its members create a group, so a rank of a large world creates about a dozen groups.
        group = dist.new_group(list(ranks), timeout=get_group_timeout(), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        label(group.group_name, axis)
        if not messages:
            connect(group)
        return group

    def get_group(axis: Axis, group: RankGroup) -> dist.ProcessGroup | None:
        return make(axis, get_group_ranks(rank, group))

    pipe = get_group_ranks(rank, get_axis_group(layout, "pp"))
    ends = tuple(sorted({pipe[0], pipe[-1]}))
    replicas = RankGroup(layout.replica_ranks, layout.tp)
    shards = get_shard_group(layout, experts=False)
    experts = RankGroup(layout.replica_ranks // layout.ep, layout.tp * layout.ep) if layout.ep > 1 else RankGroup(1, 1)
    tp, dp = get_group("tp", get_axis_group(layout, "tp")), get_group("dp", replicas)
    hsdp = layout.dp_replicas > 1
    return Mesh(
        layout=layout,
        rank=rank,
        coordinates=get_coordinates(rank, layout),
        tp=tp,
        key_values=get_group("tp", RankGroup(count_kv_replicas(spec.model.num_kv_heads, layout.tp), 1)),
        cp=get_group("cp", get_axis_group(layout, "cp")),
        ep=get_group("ep", get_axis_group(layout, "ep")),
        replicas=dp,
        shards=get_group("dp", shards) if hsdp else dp,
        hsdp_replicas=get_group("dp", RankGroup(layout.dp_replicas, shards.stride * shards.size)) if hsdp else None,
        expert_replicas=(expert_dp := get_group("dp", experts)),
        expert_shards=expert_dp,
        pp_forward=make("pp", pipe, messages=True),
        pp_backward=make("pp", pipe, messages=True),
        embedding=make("pp", ends) if rank in ends else None,
    )
