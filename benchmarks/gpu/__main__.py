"""Compare a GPU machine with the plan: traffic, parity, memory, rates, and speed.

    python -m benchmarks.gpu [--small] [--folder var/gpu] [--only NAME ...] [--fresh] [--docs]

Each part runs on one rank per GPU. A call ends after 25 minutes at most. The layouts run last, for the remaining time.
The next call retries the parts that ran out of time, gives them more, and continues with the remaining layouts.
Without a GPU, `--small` runs tiny models on two gloo ranks and lists the skipped parts.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from benchmarks.gpu.machine import ROOT, detect_machine, find_gpu_problem
from benchmarks.gpu.parts import list_parts
from benchmarks.gpu.running import TOTAL_S, get_start_time, run_parts
from benchmarks.gpu.table import format_lines, format_page

DOCS = ROOT / "docs" / "notebook" / "gpu-results.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--folder", type=Path, help="folder of results, default var/gpu or var/gpu-small")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run parts whose names begin with NAME")
    parser.add_argument("--fresh", action="store_true", help="also run parts that passed before")
    parser.add_argument("--docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    machine, none = detect_machine(), find_gpu_problem()
    if none and machine.device == "cuda":
        parser.error(none)
    if none and not options.small:
        parser.error(f"{none}. Use --small to run the parts that need no GPU.")
    if machine.device == "cpu" and options.docs:
        parser.error("--docs needs a GPU, and torch finds none.")
    parts = list_parts(machine, small=options.small)
    if options.only:
        names = tuple(options.only)
        parts = [part for part in parts if part.name.startswith(names)]
        if not parts:
            parser.error(f"No part of --only begins with {' or '.join(names)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the part's processes end too
    fingerprint = machine.fingerprint(small=options.small)
    # Use separate folders, because one kind of run would overwrite the results of the other.
    folder = (options.folder or Path("var/gpu-small" if options.small else "var/gpu")).resolve()
    results = run_parts(parts, folder, fingerprint, _say, get_start_time() + TOTAL_S, fresh=options.fresh)
    for line in format_lines(results):
        _say(line)
    if options.docs:
        command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        DOCS.write_text(format_page(results, fingerprint, command))
    return 1 if any(result["state"] == "failed" for result in results) else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
