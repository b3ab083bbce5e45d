"""`torchrun ... -m workers.meter [-m] SCRIPT args`: measure the traffic of an unchanged training script."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from contracts.telemetry.items import Cell
from workers.meter.activation import disable_hook
from workers.meter.marks import provide_client
from workers.meter.rank_exit import fail, finish_interpreter, run_and_exit
from workers.meter.recorder import Recorder
from workers.meter.script import ScriptError, find_script, find_script_of_spec, run_script
from workers.meter.script_meter import start_meter

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
    disable_hook()
    table = partial(print_table, os.getpid())
    rank = int(os.environ.get("RANK") or 0)
    meter = start_meter(rank, options.telemetry, options.job, options.attempt, print_table=table)
    code = run_script(script, lambda: provide_client(meter.marks))
    if meter.exporter is not None and code:
        meter.exporter.report_end()  # a thread of the script may hold the process
    finish_interpreter()
    return code


def print_table(process: int, recorder: Recorder) -> None:
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


if __name__ == "__main__":
    run_and_exit(main)
