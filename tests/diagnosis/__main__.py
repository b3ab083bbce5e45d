"""Faults put into real runs, and what the diagnosis says of them and when; healthy runs, and whether it says that
anything is wrong with those. A row each: what was done, with which seed (it draws the rank or the host that has the
fault), the seconds to the word (of a standstill from its threshold on), whether it was right, what was said."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.diagnosis.cases import CASES, HEALTHY, healthy_spec
from tests.diagnosis.trying import Tried, healthy, try_case

SAID = 900
FAULTS, LAYOUTS = "faults", "healthy"
RIGHT = {True: "right", False: "WRONG", None: "not tried"}
LASTS = """A fault takes up to 2 minutes, most of it the start of a run, a healthy layout --seconds and 20 s: with 3
seeds about an hour and a quarter on 2 cores, with --seconds 360 two hours. So it can be run in parts."""


def row(name: str, seed: str, tried: Tried) -> str:
    seconds = "-" if tried.seconds is None else f"{tried.seconds:.1f}"
    return f"{name:<36}  {seed:>4}  {seconds:>6}  {RIGHT[tried.right]:<9}  {tried.said[:SAID]}"


def tries(names: list[str], seeds: list[int], seconds: float) -> Iterator[tuple[str, str, Tried]]:
    for name in CASES:
        for seed in seeds if name in names else []:
            yield name, str(seed), try_case(name, seed)
    for name in HEALTHY:
        if name in names:
            yield name, "-", healthy(healthy_spec(name), seconds)


def asked(parser: argparse.ArgumentParser, names: list[str]) -> list[str]:
    known = {FAULTS: list(CASES), LAYOUTS: list(HEALTHY), **{name: [name] for name in (*CASES, *HEALTHY)}}
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown: {'; '.join(unknown)}. There are: {'; '.join(known)}")
    return [one for name in names or (FAULTS, LAYOUTS) for one in known[name]]


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__, epilog=LASTS)
    parser.add_argument("names", nargs="*", help=f"of faults or layouts, or {FAULTS!r}, or {LAYOUTS!r}; all by default")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="of each fault, as in 1,2,3 (default)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that each healthy layout runs; 360 are an hour")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # hosts and runs end with it
    names, began = asked(parser, options.names), time.monotonic()
    found: Counter[bool | None] = Counter()
    print(f"{'what is done':<36}  {'seed':>4}  {'s':>6}  {'':<9}  what is said")
    for name, seed, tried in tries(names, options.seeds, options.seconds):
        found[tried.right] += 1
        print(row(name, seed, tried), flush=True)
    print(f"in {(time.monotonic() - began) / 60:.0f} min, {found[None]} not tried here")
    print(f"{found[True]} passed, {found[False]} failed")
    return 0 if found[True] and not found[False] else 1


if __name__ == "__main__":
    sys.exit(main())
