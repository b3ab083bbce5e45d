"""`make diagnose`: faults put into real runs, and what the diagnosis says of them and when; healthy runs, and whether
it says that anything is wrong with those. Names after it are tried alone."""

from __future__ import annotations

import argparse
import sys

from tests.diagnosis.cases import CASES, HEALTHY, healthy_spec
from tests.diagnosis.trying import Tried, healthy, try_case

SAID = 150


def row(name: str, seed: str, tried: Tried) -> str:
    seconds = "-" if tried.seconds is None else f"{tried.seconds:.1f}"
    verdict = "" if tried.passed else "FAIL"
    return f"{name:<40}  {seed:>4}  {seconds:>6}  {verdict:<4}  {tried.said[:SAID]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults or layouts; all by default")
    parser.add_argument("--seeds", type=int, default=3, help="of each fault: which rank has it")
    parser.add_argument("--seconds", type=float, default=60.0, help="that each healthy layout runs; 360 are an hour")
    options = parser.parse_args()
    passed = failed = 0
    print(f"{'what is done':<40}  {'seed':>4}  {'s':>6}        what is said")
    for name in [name for name in CASES if not options.names or name in options.names]:
        for seed in range(1, options.seeds + 1):
            tried = try_case(name, seed)
            passed, failed = passed + tried.passed, failed + (not tried.passed)
            print(row(name, str(seed), tried), flush=True)
    for name in [name for name in HEALTHY if not options.names or name in options.names]:
        tried = healthy(healthy_spec(name), options.seconds)
        passed, failed = passed + tried.passed, failed + (not tried.passed)
        print(row(name, "-", tried), flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
