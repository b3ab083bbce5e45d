"""Compare the kernel's byte counters with the gloo model for each connection."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.witness.compare import LAYOUTS, WorkComparison, build_training_request, list_primitive_requests, run_requests

GROUPS = [[1, 3], [0, 2, 3], [0, 1, 2, 3]]
SIZES = [4 * 2**10, 64 * 2**10, 3 * 2**19, 12 * 2**20]
TITLES = ("work", "hosts", "bytes/call", "directions", "worst", "gloo model B", "kernel B", "ratio")
LINE = "{:<15}{:>6}{:>14}{:>13}{:>7}{:>14}{:>14}{:>8}  {}"


def format_row(seen: WorkComparison) -> str:
    worst = seen.worst
    size = f"{seen.call_bytes:,}" if seen.call_bytes else "-"
    ends = f"{worst.rank}>{worst.peer}"
    numbers = (f"{worst.modelled:,}", f"{worst.wire:,}", f"{worst.ratio:.4f}")
    return LINE.format(seen.name, seen.hosts, size, len(seen.pairs), ends, *numbers, "pass" if seen.passed else "FAIL")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = run_requests(
            [list_primitive_requests(GROUPS, SIZES), *map(build_training_request, LAYOUTS)], Path(folder, "out")
        )
    print(LINE.format(*TITLES, "verdict"))
    for seen in found:
        print(format_row(seen))
    pairs = sum(len(seen.pairs) for seen in found)
    print(f"{sum(seen.exact for seen in found)} of {pairs} directions match exactly")
    failed = sum(not seen.passed for seen in found)
    print(f"{len(found) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
