"""`torchrun ... -m workers.meter [-m] SCRIPT args`: a training script of one's own, unchanged, and what it sends."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from contracts.telemetry.steps import Cell, PhaseItem
from contracts.telemetry.vocabulary import SCRIPT_SETUP_STEPS
from workers.meter.exporter import Exporter, StartReporter
from workers.meter.intercept import patch_group_creation
from workers.meter.rank_exit import fail, finish_interpreter, run_and_exit
from workers.meter.recorder import Recorder
from workers.meter.script import ScriptError, find_script, find_script_of_spec, run_script

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
    # Of a run whose prediction is known: what that calls a group of all ranks.
    compared = os.environ.get("MESHBOARD_COMPARE", "")
    exporter = Exporter(recorder, options.telemetry, options.job, options.attempt) if options.telemetry else None
    start = StartReporter(rank, exporter.send if exporter else lambda _item: None)
    start.report("imported")
    ranks_itself = exporter is None and not os.environ.get("RANK")

    def met(group: dist.ProcessGroup) -> None:
        start.report("met")
        if ranks_itself and not dist.is_initialized():
            recorder.rank = group.rank()

    patch_group_creation(recorder, compared or "world", met)
    count_steps(recorder, lambda: start.report("first step"))
    if exporter is not None:
        exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
        atexit.register(exporter.close)
        recorder.begin_step(1)
        if rank == 0 or compared:
            told = StepCounter(recorder)
            exporter.add_source(told.poll)
            if compared:
                register_optimizer_step_post_hook(told.record_step)
    else:
        atexit.register(print_table, recorder, os.getpid())
    code = run_script(script)
    finish_interpreter()
    return code


def count_steps(recorder: Recorder, stepped_once: Callable[[], None] = lambda: None) -> RemovableHandle:
    """Setup lasts until the first optimiser steps have ended, of which the very first is told; what follows are steps.

    Several optimisers that take turns make one step together: the next begins when one of them comes again.
    """
    turns: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in turns or not turns:
            turns.clear()
            recorder.step += 1
            recorder.end_step(recorder.step)
            stepped_once()
            if recorder.step >= SCRIPT_SETUP_STEPS:
                recorder.set_phase("step")
            recorder.begin_step(recorder.step + 1)
        turns.add(optimizer)

    return register_optimizer_step_post_hook(stepped)


class StepCounter:
    """Tells the supervisor how many optimiser steps have ended, beside the counters, so that a rank that is killed has
    told both. Who calls `note` as each ends has what they sent told as well."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted: tuple[int, list[Cell]] | None = None
        self._told = 0

    def record_step(self, *_: object) -> None:
        self._noted = self._recorder.step, self._recorder.get_cells("step")

    def poll(self) -> PhaseItem | None:
        """What is to be told now, if anything."""
        noted = self._noted
        steps = self._recorder.step if noted is None else noted[0]
        if steps == self._told:
            return None
        self._told = steps
        item = PhaseItem(kind="phase", rank=self._recorder.rank, time=time.time(), phase="step", steps=steps)
        if noted is not None:
            item["cells"] = noted[1]
        return item


def print_table(recorder: Recorder, process: int) -> None:
    """What rank 0 sent. What the script forked says nothing, though it may end as we do."""
    if recorder.rank == 0 and os.getpid() == process:
        print(format_table(recorder.get_cells(), recorder.step), file=sys.stderr)


def format_table(cells: list[Cell], steps: int) -> str:
    """What this rank sent, as text."""
    lines = [
        f"Rank 0 after {steps} optimizer steps. Payload is the bytes in the buffers of its collectives. "
        "Algorithmic is the bytes that rank 0 needs to send."
    ]
    names = f"{'phase':<8}{'group':<24}{'collective':<16}{'calls':>9}"
    lines.append(f"{names}{'payload B':>20}{'algorithmic B':>20}{'s':>9}")
    for c in cells:
        counted = f"{c['count']:>9,}{c['payload_bytes']:>20,}{c['algorithmic_bytes']:>20,}{c['busy_s']:>9.3f}"
        lines.append(f"{c['phase']:<8}{c['axis']:<24}{c['op']:<16}{counted}")
    return "\n".join(lines if cells else [*lines, NO_COLLECTIVES_TEXT])


if __name__ == "__main__":
    run_and_exit(main)
