"""Meters the groups of a script that knows nothing of it.

Checked on torch 2.13.0: `distributed_c10d._new_process_group_helper`, through which every group is made, `_world`'s
dicts, in which it is entered, and `DeviceMesh._dim_group_names`. tests/workers/meter/test_script.py fails when they
change.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from workers.meter.group import MeteredGroup, coalesce_metered_p2p
from workers.meter.recorder import Recorder

METERED_BACKENDS = ("gloo", "nccl")
# What torch calls a group that nobody described: of its own, and of a mesh whose axes have no names.
UNNAMED = re.compile(r"|undefined|default_pg|mesh_default|mesh_dim_\d+")
MAX_NAME = 60  # characters


def meter_every_group(recorder: Recorder) -> None:
    """From now on each group that anybody makes over gloo or NCCL is counted.

    Under the name that its mesh axis or `group_desc` gives it, else under the words for its ranks.
    """
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(group_size: int, group_rank: int, global_ranks_in_group: list[int], *args: Any, **kwargs: Any) -> Any:
        group, store = original(group_size, group_rank, global_ranks_in_group, *args, **kwargs)
        if not isinstance(group, dist.ProcessGroup) or isinstance(group, MeteredGroup):
            return group, store
        devices = [d for d in group._device_types if group._get_backend(d).name() in METERED_BACKENDS]
        if not devices:
            return group, store
        ranks = global_ranks_in_group or list(range(group_size))
        return _swap(group, recorder, devices, words_for(ranks, dist_size(group_size))), store

    def dist_size(default: int) -> int:
        return dist.get_world_size() if dist.is_initialized() else default

    c10d._new_process_group_helper = helper
    _name_mesh_axes(recorder)
    if torch.cuda.is_available():
        coalesce_metered_p2p()


def _name_mesh_axes(recorder: Recorder) -> None:
    """A mesh axis as large as the world takes the default group, which had no name yet: let it have the axis's."""
    make, make_from = DeviceMesh.__init__, DeviceMesh.from_group

    def name(mesh: DeviceMesh) -> None:
        for axis, group in zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False):
            if recorder.axis_of(group) == "world":
                recorder.name_group(group, printable(axis))

    @functools.wraps(make)
    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        name(self)

    @functools.wraps(make_from)
    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        mesh = make_from(*args, **kwargs)
        name(mesh)
        return mesh

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    DeviceMesh.from_group = staticmethod(from_group)  # type: ignore[method-assign]


def given_name(description: str) -> str:
    """The name somebody gave a group, for a table; empty when nobody did."""
    return "" if UNNAMED.fullmatch(description) else printable(description.removeprefix("mesh_"))


def printable(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME])


def words_for(ranks: list[int], world_size: int) -> str:
    """A group in words: "world", "ranks 0-3", "ranks 0,2,4,6", "ranks 0,8..56 (8)"."""
    if len(ranks) == world_size:
        return "world"
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and ranks == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    if len(ranks) <= 4:
        return f"ranks {','.join(map(str, ranks))}"
    return f"ranks {first},{ranks[1]}..{last} ({len(ranks)})"


def _swap(native: Any, recorder: Recorder, devices: list[torch.device], words: str) -> MeteredGroup:
    """Put a metered group in a native one's place, wherever torch has entered it."""
    world: Any = c10d._world
    name = world.pg_names[native]
    metered = MeteredGroup(native, name, recorder, devices)
    metered._set_group_name(name)
    metered._set_group_desc(native.group_desc)
    for entered in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        entered[metered] = entered.pop(native)
    for groups in world.tags_to_pg.values():
        groups[:] = [metered if group is native else group for group in groups]
    _unregister_process_group(name)
    _register_process_group(name, metered)
    recorder.name_group(name, given_name(native.group_desc) or words)
    return metered
