"""Run the multi-host tests and their faults (`make cluster`), and print a table row for each."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.cluster import get_missing_requirement
from tests.faults.__main__ import run


def main() -> int:
    if missing := get_missing_requirement():
        print(f"no cluster on this machine: {missing}")
        print("0 passed, 0 failed")
        return 0
    return run([Path(__file__).parent], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
