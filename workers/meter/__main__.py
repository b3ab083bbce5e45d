"""`torchrun ... -m workers.meter SCRIPT args`: a training script of one's own, unchanged, and what it sends."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from contracts.telemetry import Cell, PhaseItem
from planner.parse import parse_spec
from workers.meter.exporter import Exporter
from workers.meter.intercept import meter_every_group
from workers.meter.recorder import Recorder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workers.meter", description=__doc__)
    parser.add_argument("--job", default="local")
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--telemetry", help="unix socket of the supervisor; without it rank 0 prints a table")
    parser.add_argument("--spec", type=Path, help="JSON file with a job spec that names the script and its arguments")
    parser.add_argument("--root", type=Path, help="directory that the spec's script must lie below")
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if (options.script is None) == (options.spec is None):
        parser.error("give either a script or --spec")
    wanted, arguments = options.script, options.arguments
    if options.spec is not None:
        wanted, arguments = _ordered(options.spec)
    script = _found(wanted, options.root)
    if script is None:
        where = "" if options.root is None else " below the script root"
        parser.error(f"script.path: there is no {wanted!r}{where}")
    rank = int(os.environ.get("RANK", "0"))
    recorder = Recorder(rank)
    meter_every_group(recorder)
    count_steps(recorder)
    if options.telemetry:
        exporter = Exporter(recorder, options.telemetry, options.job, options.attempt)
        exporter.send(PhaseItem(kind="phase", rank=rank, time=time.time(), phase="step"))
        atexit.register(exporter.close)
    elif rank == 0:
        atexit.register(lambda: print(table(recorder.cells(), recorder.step), file=sys.stderr))
    # As `python SCRIPT args` would: its folder first on the path, its name and arguments in argv.
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    code = run(script)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads still hand over what has completed: in an interpreter that is going down they abort the process.
    os._exit(code)


def _ordered(spec: Path) -> tuple[str, list[str]]:
    """The script and the arguments that a job's spec names."""
    script = parse_spec(json.loads(spec.read_text())).script
    assert script is not None
    return script.path, script.args


def _found(script: str, root: Path | None) -> Path | None:
    """The script's file; where a root is given, only what really lies below it."""
    try:
        path = Path(script) if root is None else (root / script).resolve()
        inside = root is None or path.is_relative_to(root.resolve())
        return path if inside and path.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name too long, half a character, a circle of links
        return None


def run(script: Path) -> int:
    """Run a script as the main program; the exit code that Python would give it."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def count_steps(recorder: Recorder) -> None:
    """Setup lasts until the first optimiser step has ended; what follows are steps."""

    def stepped(*_: object) -> None:
        recorder.step += 1
        recorder.set_phase("step")

    register_optimizer_step_post_hook(stepped)


def table(cells: list[Cell], steps: int) -> str:
    """What this rank sent, as text."""
    lines = [f"rank 0 after {steps} optimiser steps; payload is what it handed over, algorithmic what it had to send"]
    names = f"{'phase':<8}{'group':<24}{'collective':<16}{'calls':>9}"
    lines.append(f"{names}{'payload B':>20}{'algorithmic B':>20}{'s':>9}")
    for c in cells:
        counted = f"{c['count']:>9,}{c['payload_bytes']:>20,}{c['algorithmic_bytes']:>20,}{c['busy_s']:>9.3f}"
        lines.append(f"{c['phase']:<8}{c['axis']:<24}{c['op']:<16}{counted}")
    return "\n".join(lines if cells else [*lines, "no collective passed"])


if __name__ == "__main__":
    main()
