"""Run all parity layouts and print a table: `make parity`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.parity.cases import LAYOUTS, all_cases
from tests.parity.compare import HEADER, run_all, table_row


def main() -> int:
    names = tuple(n for n in LAYOUTS if len(sys.argv) < 2 or n in sys.argv[1:])
    with tempfile.TemporaryDirectory() as work:
        results = run_all(all_cases(names), Path(work))
    print(HEADER)
    for result in results:
        print(table_row(result))
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
