"""`torchrun ... -m workers.meter [-m] SCRIPT args`: measure the traffic of an unchanged training script."""

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
    count_steps(recorder, lambda: start.report("first step"))
    if exporter is not None:
        exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
        atexit.register(exporter.close)
        recorder.begin_step(1)
        if rank == 0 or predicted_label:
            counter = StepCounter(recorder)
            exporter.add_source(counter.poll)
            if predicted_label:
                register_optimizer_step_post_hook(counter.record_step)
    else:
        atexit.register(print_table, recorder, os.getpid())
    code = run_script(script)
    finish_interpreter()
    return code


def count_steps(recorder: Recorder, on_step: Callable[[], None] = lambda: None) -> RemovableHandle:
    """Count optimizer steps. The phase is "setup" for the first steps, then "step".

    Several optimizers that take turns make one step together. The next step begins when one of them steps again.
    """
    stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def record_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in stepped or not stepped:
            stepped.clear()
            recorder.step += 1
            recorder.end_step(recorder.step)
            on_step()
            if recorder.step >= SCRIPT_SETUP_STEPS:
                recorder.set_phase("step")
            recorder.begin_step(recorder.step + 1)
        stepped.add(optimizer)

    return register_optimizer_step_post_hook(record_step)


class StepCounter:
    """Report the number of optimizer steps, so that the count survives a killed rank.

    With `record_step` as a hook, the report also has the exact counters of the last step.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: tuple[int, list[Cell]] | None = None
        self._reported_steps = 0

    def record_step(self, *_: object) -> None:
        """Remember the counters at the end of a step."""
        self._last = self._recorder.step, self._recorder.get_cells("step")

    def poll(self) -> PhaseItem | None:
        """Return a report if the number of steps changed."""
        last = self._last
        steps = self._recorder.step if last is None else last[0]
        if steps == self._reported_steps:
            return None
        self._reported_steps = steps
        item = PhaseItem(kind="phase", rank=self._recorder.rank, time=time.time(), phase="step", steps=steps)
        if last is not None:
            item["cells"] = last[1]
        return item


def print_table(recorder: Recorder, process: int) -> None:
    """Print the traffic of rank 0. Processes that the script forked print nothing at their exit."""
    if recorder.rank == 0 and os.getpid() == process:
        print(format_table(recorder.get_cells(), recorder.step), file=sys.stderr)


def format_table(cells: list[Cell], steps: int) -> str:
    """Format the traffic of rank 0 as a table."""
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
