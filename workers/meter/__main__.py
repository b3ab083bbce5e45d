"""`torchrun ... -m workers.meter [-m] SCRIPT args`: measure the traffic of an unchanged training script."""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from contracts.telemetry.items import Cell, PhaseItem
from workers.meter.exporter import Exporter, StartReporter
from workers.meter.marks import provide_client, register_marks
from workers.meter.monitors import PeakMonitor
from workers.meter.process_group import MeteredProcessGroup, patch_batch_isend_irecv
from workers.meter.rank_exit import fail, finish_interpreter, run_and_exit
from workers.meter.recorder import Recorder
from workers.meter.script import ScriptError, find_script, find_script_of_spec, run_script
from workers.meter.script_steps import StepTracker
from workers.meter.training_hooks import install_hooks
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
NO_COLLECTIVES_TEXT = "No collective ran in this process. Processes that the script starts are not metered."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.meter", description=__doc__, allow_abbrev=False)
    parser.add_argument("--job", default="local")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument(
        "--telemetry",
        default=os.environ.get("MESHBOARD_TELEMETRY"),
        help="Unix socket of the supervisor (default: MESHBOARD_TELEMETRY); without a socket, rank 0 prints a table",
    )
    parser.add_argument("--spec", type=Path, help="JSON file with a job spec that names the script and its arguments")
    parser.add_argument("--root", type=Path, help="root directory of scripts")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run SCRIPT as a module")
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if (options.script is None) != (options.spec is not None and options.root is not None):
        parser.error("Use a script, or --spec and --root.")
    try:
        if options.spec is not None:
            script = find_script_of_spec(options.spec, options.root)
        else:
            script = find_script(options.script, options.arguments, is_module=options.is_module)
    except ScriptError as error:
        return fail(str(error), 2)
    rank = int(os.environ.get("RANK") or 0)
    recorder = Recorder(rank)
    # Set for a run with a prediction: the label of groups with all ranks in the prediction.
    predicted_label = os.environ.get("MESHBOARD_COMPARE", "")
    exporter = Exporter(recorder, options.telemetry, options.job, options.attempt) if options.telemetry else None
    start = StartReporter(rank, exporter.send if exporter else lambda _item: None)
    start.report("imported")
    sets_own_rank = exporter is None and not os.environ.get("RANK")

    def on_group(group: dist.ProcessGroup) -> None:
        start.report("met")
        if sets_own_rank and not dist.is_initialized():
            recorder.rank = group.rank()

    patch_group_creation(recorder, predicted_label or "world", on_group)
    tracker = StepTracker(recorder, exporter.send if exporter else None, lambda: start.report("first step"))
    install_hooks(tracker)
    marks = register_marks(tracker)
    if exporter is not None:
        exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
        atexit.register(exporter.close)
        exporter.add_source(tracker.poll)
        exporter.add_source(PeakMonitor(rank).poll)
        recorder.begin_step(1)
    else:
        atexit.register(print_table, recorder, os.getpid())
    atexit.register(tracker.close)  # runs first
    code = run_script(script, lambda: provide_client(marks))
    if exporter is not None and code:
        exporter.report_end()  # a thread of the script may hold the process
    finish_interpreter()
    return code


def print_table(recorder: Recorder, process: int) -> None:
    """Print the traffic of rank 0. Processes that the script forked print nothing at their exit."""
    if recorder.rank == 0 and os.getpid() == process:
        print(format_table(recorder.get_cells(), recorder.step), file=sys.stderr)


def format_table(cells: list[Cell], steps: int) -> str:
    """Format the traffic of rank 0 as a table."""
    lines = [
        f"Rank 0 after {steps} steps. Payload is the bytes in the buffers of its collectives. "
        "Algorithmic is the bytes that rank 0 needs to send."
    ]
    names = f"{'phase':<8}{'group':<24}{'collective':<16}{'calls':>9}"
    lines.append(f"{names}{'payload B':>20}{'algorithmic B':>20}{'s':>9}")
    for c in cells:
        counted = f"{c['count']:>9,}{c['payload_bytes']:>20,}{c['algorithmic_bytes']:>20,}{c['busy_s']:>9.3f}"
        lines.append(f"{c['phase']:<8}{c['axis']:<24}{c['op']:<16}{counted}")
    return "\n".join(lines if cells else [*lines, NO_COLLECTIVES_TEXT])


def patch_group_creation(
    recorder: Recorder,
    world_label: str = "world",
    on_group: Callable[[dist.ProcessGroup], None] = lambda _group: None,
) -> None:
    """Meter each gloo and NCCL group that any code creates from now on.

    A group is labeled with its mesh axis or `group_desc`, or else with its ranks.

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
        label = get_user_label(group.group_desc) or format_ranks(ranks, world_size, world_label)
        recorder.name_group(name, label)
        return MeteredProcessGroup(group, name, recorder, devices, ranks)

    replace_new_groups(replace)
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


if __name__ == "__main__":
    run_and_exit(main)
