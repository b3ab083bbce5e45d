"""Meters the groups of a script that knows nothing of it."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workers.meter.process_group import MeteredProcessGroup, patch_batch_isend_irecv
from workers.meter.recorder import Recorder
from workers.torch_private.groups import axis_groups, backends_of, devices_over, name_of, on_each_new_group

METERED_BACKENDS = ("gloo", "nccl")
SAID_NOTHING_OF = {*METERED_BACKENDS, "fake"}  # which sends nothing
# What torch calls a group that nobody described: of its own, and of a mesh whose axes have no names.
UNNAMED = re.compile(r"|undefined|default_pg|mesh_default|mesh_dim_\d+")
MAX_NAME = 60  # characters


def patch_group_creation(
    recorder: Recorder, whole: str = "world", met: Callable[[dist.ProcessGroup], None] = lambda _group: None
) -> None:
    """From now on each group that anybody makes over gloo or NCCL is counted; `met` is called with each that is up.

    Under the name that its mesh axis or `group_desc` gives it, else under the words for its ranks, `whole` for all.
    """

    told: set[str] = set()

    def replace(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
        if isinstance(group, MeteredProcessGroup):
            return group
        for backend in backends_of(group) - told - SAID_NOTHING_OF:
            told.add(backend)
            print(f"meshboard: traffic over {backend} is not counted. Only gloo and NCCL are counted.", file=sys.stderr)
        devices = devices_over(group, METERED_BACKENDS)
        if not devices:
            return group
        met(group)
        name, world_size = name_of(group), dist.get_world_size() if dist.is_initialized() else len(ranks)
        recorder.name_group(name, get_user_label(group.group_desc) or format_ranks(ranks, world_size, whole))
        return MeteredProcessGroup(group, name, recorder, devices, ranks)

    on_each_new_group(replace)
    _name_mesh_axes(recorder, whole)
    patch_batch_isend_irecv()  # unasked for a GPU: to ask CUDA here would keep it from processes that the script forks


def _name_mesh_axes(recorder: Recorder, whole: str) -> None:
    """A mesh axis as large as the world takes the default group, which had no name yet: let it have the axis's."""
    make, make_from = DeviceMesh.__init__, DeviceMesh.from_group

    def name(mesh: DeviceMesh) -> None:
        for axis, group in axis_groups(mesh):
            if recorder.get_label(group) == whole:
                recorder.name_group(group, sanitize_label(axis))

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


def get_user_label(description: str) -> str:
    """The name somebody gave a group, for a table; empty when nobody did."""
    return "" if UNNAMED.fullmatch(description) else sanitize_label(description.removeprefix("mesh_"))


def sanitize_label(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name[:MAX_NAME])


def format_ranks(ranks: list[int], world_size: int, whole: str = "world") -> str:
    """A group in words: "world" or what `whole` says, "ranks 0-3", "ranks 0,2,4,6", "ranks 0,8..56 (8)"."""
    if len(ranks) == world_size:
        return whole
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and ranks == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    if len(ranks) <= 4:
        return f"ranks {','.join(map(str, ranks))}"
    return f"ranks {first},{ranks[1]}..{last} ({len(ranks)})"
