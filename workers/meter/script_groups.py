"""Meter the process groups that a script creates, and label them."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from contracts.telemetry.items import Label
from planner.facts.inferred_layout import AXIS_NAMES, get_named_axis
from workers.meter.collectives import GroupState
from workers.meter.process_group import MeteredProcessGroup, patch_batch_isend_irecv
from workers.meter.recorder import Recorder
from workers.meter.variable_names import find_variable
from workers.torch_private.groups import (
    get_backend_names,
    get_group_name,
    list_axis_groups,
    list_devices,
    replace_new_groups,
)

METERED_BACKENDS = ("gloo", "nccl")
SILENT_BACKENDS = {*METERED_BACKENDS, "fake"}  # no warning is printed for these
# Torch's descriptions of groups without a description, and of meshes without axis names.
UNNAMED = re.compile(r"|undefined|default_pg|mesh_default|mesh_dim_\d+")
MAX_LABEL_CHARS = 60
VARIABLE_WORDS = ("comm", "group", "groups", "mesh", "parallel", "pg", "process", "self")
OWN_AND_TORCH_FOLDERS = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(dist.__file__).parent}{os.sep}")
TORCH_PIPELINE_FOLDER = f"{Path(dist.__file__).parent}{os.sep}pipelining{os.sep}"
# Axes whose ranks send to their neighbors. The first one wins if two groups have the same ranks.
P2P_AXES = ("pp", "cp")
PIPELINE_WORDS = frozenset(word for word, axis in AXIS_NAMES.items() if axis == "pp")
RING_WORDS = frozenset(("ring", *(word for word, axis in AXIS_NAMES.items() if axis == "cp")))
MAX_CACHED_FUNCTIONS = MAX_CACHED_PEERS = 256


def patch_group_creation(
    recorder: Recorder,
    world_label: str = "world",
    on_group: Callable[[dist.ProcessGroup], None] = lambda _group: None,
) -> None:
    """Meter each gloo and NCCL group that any code creates from now on.

    A group is labeled with its mesh axis or `group_desc`, or else with the axis that its variable names, or else with
    its ranks.

    Args:
        world_label: Label of groups with all ranks.
        on_group: Called with each new group.
    """
    warned: set[str] = set()

    def replace(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
        if isinstance(group, MeteredProcessGroup):
            return group
        for backend in get_backend_names(group) - warned - SILENT_BACKENDS:
            warned.add(backend)
            print(f"meshboard: traffic over {backend} is not counted. Only gloo and NCCL are counted.", file=sys.stderr)
        devices = list_devices(group, METERED_BACKENDS)
        if not devices:
            return group
        on_group(group)
        name, world_size = get_group_name(group), dist.get_world_size() if dist.is_initialized() else len(ranks)
        user_label = get_user_label(group.group_desc) or get_variable_label(find_variable(_find_caller()))
        label = user_label or format_ranks(ranks, world_size, world_label)
        recorder.name_group(name, label)
        return MeteredProcessGroup(group, name, recorder, devices, ranks)

    replace_new_groups(replace)
    recorder.find_p2p_axis = functools.partial(find_p2p_axis, recorder)
    _label_mesh_axes(recorder, world_label)
    # Patched even without a GPU, because a CUDA query here would break CUDA in processes that the script forks.
    patch_batch_isend_irecv()


def _label_mesh_axes(recorder: Recorder, world_label: str) -> None:
    """Label the default group with the mesh axis of world size, which uses it."""
    original_init, original_from_group = DeviceMesh.__init__, DeviceMesh.from_group

    def label_axes(mesh: DeviceMesh) -> None:
        for axis, group in list_axis_groups(mesh):
            if recorder.get_label(group) == world_label:
                recorder.name_group(group, sanitize_label(axis))

    @functools.wraps(original_init)
    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        label_axes(self)

    @functools.wraps(original_from_group)
    def from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        mesh = original_from_group(*args, **kwargs)
        label_axes(mesh)
        return mesh

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    DeviceMesh.from_group = staticmethod(from_group)  # type: ignore[method-assign]


def get_user_label(description: str) -> str:
    """Return the label that a user gave a group, or an empty string."""
    return "" if UNNAMED.fullmatch(description) else sanitize_label(description.removeprefix("mesh_"))


def get_variable_label(name: str) -> str:
    """Return the axes in the name of a variable, as in `_DATA_PARALLEL_GROUP`, or an empty string."""
    words = [word for word in name.lower().split("_") if word and word not in VARIABLE_WORDS]
    return "_".join(words) if words and all(word in AXIS_NAMES for word in words) else ""


def find_p2p_axis(recorder: Recorder, label: Label, group: GroupState, peer: int) -> tuple[Label, int]:
    """Return the label and the size of the axis along which this rank communicates with a peer.

    Scripts often send between pipeline stages over the default group. The axis is then the smallest named group of this
    rank and the peer. If no group has an axis name, the names in the calling function decide.

    Args:
        label: Label of the used group.
        peer: Global rank.
    """
    if get_named_axis(label) is not None:
        return label, len(group.ranks)
    found = _find_named_group(recorder, recorder.label_changes, peer)
    if found is not None:
        return found
    return ("pp" if _is_called_by_pipeline() else label), len(group.ranks)


@lru_cache(MAX_CACHED_PEERS)
def _find_named_group(recorder: Recorder, _label_changes: int, peer: int) -> tuple[Label, int] | None:
    """Return the smallest group of this rank and a peer whose label is an axis. A script may have many groups."""
    found = []
    for other in recorder.groups.all():
        name = recorder.get_label(other.name)
        axis = get_named_axis(name)
        if axis is not None and peer in other.ranks and recorder.rank in other.ranks:
            preference = P2P_AXES.index(axis) if axis in P2P_AXES else len(P2P_AXES)
            found.append((len(other.ranks), preference, name))
    if not found:
        return None
    size, _, name = min(found)
    return name, size


def _is_called_by_pipeline() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_AND_TORCH_FOLDERS):
        if frame.f_code.co_filename.startswith(TORCH_PIPELINE_FOLDER):
            return True
        frame = frame.f_back
    return frame is not None and names_pipeline(frame.f_code)


@lru_cache(MAX_CACHED_FUNCTIONS)
def names_pipeline(code: CodeType) -> bool:
    """Return True if the names in a function are about pipeline stages, and not about ring attention."""
    names = (Path(code.co_filename).stem, code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars)
    words = {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    return not words.isdisjoint(PIPELINE_WORDS) and words.isdisjoint(RING_WORDS)


def _find_caller() -> FrameType | None:
    """Return the frame of the script or library that creates a group through torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_AND_TORCH_FOLDERS):
        frame = frame.f_back
    return frame


def sanitize_label(name: str) -> str:
    """Truncate a label, and replace unprintable characters."""
    return "".join(char if char.isprintable() else "?" for char in name[:MAX_LABEL_CHARS])


def format_ranks(ranks: list[int], world_size: int, world_label: str = "world") -> str:
    """Format the ranks of a group: "world", "ranks 0-3", "ranks 0,2,4,6", or "ranks 0,8..56 (8)"."""
    if len(ranks) == world_size:
        return world_label
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and ranks == list(range(first, last + 1)):
        return f"ranks {first}-{last}"
    if len(ranks) <= 4:
        return f"ranks {','.join(map(str, ranks))}"
    return f"ranks {first},{ranks[1]}..{last} ({len(ranks)})"
