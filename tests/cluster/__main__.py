"""`make cluster`: what runs over several hosts, and what is done to them; a row for each, as in `make faults`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cluster.cluster import why_not
from tests.faults.__main__ import run


def main() -> int:
    if missing := why_not():
        print(f"no cluster on this machine: {missing}")
        print("0 passed, 0 failed")
        return 0
    return run([Path(__file__).parent], sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
