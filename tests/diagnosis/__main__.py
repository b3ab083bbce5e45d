"""Put faults into real runs, and print the diagnosis of each; run healthy runs, and print false alarms.

Each row has the fault, its seed (which draws the rank or host), seconds to the diagnosis, and the verdict.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.diagnosis.case_runner import CaseResult, run_case, run_healthy
from tests.diagnosis.cases import CASES, HEALTHY, build_healthy_spec
from tests.diagnosis.script_cases import FAULTS as SCRIPT_FAULTS
from tests.diagnosis.script_cases import HEALTHY as HEALTHY_SCRIPTS
from tests.diagnosis.script_runner import run_faults, run_healthy_scripts

MAX_RESULT_CHARS = 900
FAULTS, LAYOUTS, SCRIPTS, SCRIPT_PAUSES = "faults", "healthy", "script faults", "healthy scripts"
RIGHT = {True: "right", False: "WRONG", None: "not tried"}
DURATION_NOTE = """A fault takes up to 2 minutes, most of them to start a run. A healthy layout takes --seconds and
20 s. With 3 seeds all take about 75 minutes on 2 cores, or two hours with --seconds 360. So it can be run in parts."""


def format_row(name: str, seed: str, tried: CaseResult) -> str:
    seconds = "-" if tried.seconds is None else f"{tried.seconds:.1f}"
    return f"{name:<36}  {seed:>4}  {seconds:>6}  {RIGHT[tried.right]:<9}  {tried.said[:MAX_RESULT_CHARS]}"


def run_tries(names: list[str], seeds: list[int], seconds: float) -> Iterator[tuple[str, str, CaseResult]]:
    for name in CASES:
        for seed in seeds if name in names else []:
            yield name, str(seed), run_case(name, seed)
    for name in HEALTHY:
        if name in names:
            yield name, "-", run_healthy(build_healthy_spec(name), seconds)
    if scripts := [name for name in names if name in SCRIPT_FAULTS]:
        for name, result in run_faults(scripts):
            yield name, "-", result
    if scripts := [name for name in names if name in HEALTHY_SCRIPTS]:
        for name, result in run_healthy_scripts(scripts, seconds):
            yield name, "-", result


def select_cases(parser: argparse.ArgumentParser, names: list[str]) -> list[str]:
    known = {FAULTS: list(CASES), LAYOUTS: list(HEALTHY)}
    known |= {SCRIPTS: list(SCRIPT_FAULTS), SCRIPT_PAUSES: list(HEALTHY_SCRIPTS)}
    known |= {name: [name] for name in [name for names in known.values() for name in names]}
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {'; '.join(unknown)}. There are: {'; '.join(known)}")
    return [one for name in names or (FAULTS, LAYOUTS, SCRIPTS, SCRIPT_PAUSES) for one in known[name]]


def parse_numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__, epilog=DURATION_NOTE)
    parser.add_argument("names", nargs="*", help=f"of faults or layouts, or {FAULTS!r}, or {LAYOUTS!r}; all by default")
    parser.add_argument("--seeds", type=parse_numbers, default=[1, 2, 3], help="of each fault, as in 1,2,3 (default)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that each healthy layout runs; 360 are an hour")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # hosts and runs end with it
    names, began = select_cases(parser, options.names), time.monotonic()
    found: Counter[bool | None] = Counter()
    print(f"{'what is done':<36}  {'seed':>4}  {'s':>6}  {'':<9}  what is said")
    for name, seed, tried in run_tries(names, options.seeds, options.seconds):
        found[tried.right] += 1
        print(format_row(name, seed, tried), flush=True)
    print(f"in {(time.monotonic() - began) / 60:.0f} min, {found[None]} not tried here")
    print(f"{found[True]} passed, {found[False]} failed")
    return 0 if found[True] and not found[False] else 1


if __name__ == "__main__":
    sys.exit(main())
