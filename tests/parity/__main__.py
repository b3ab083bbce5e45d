"""Run all parity layouts and print a table: `make parity`.

Arguments choose layouts. `--precision bf16` runs them in another precision. These gradients have no exact reference.
Instead, the table shows the results of each run's verification: the differences in the first steps and in the extra
final step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.parity.cases import LAYOUTS, all_cases
from tests.parity.compare import HEADER, format_verified, run_all, table_row, verify_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", help="names of layouts, by default all")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    cases = all_cases(tuple(name for name in LAYOUTS if not options.layouts or name in options.layouts))
    with tempfile.TemporaryDirectory() as work:
        if options.precision == "fp32":
            results = run_all(cases, Path(work))
            rows, passed = [HEADER, *map(table_row, results)], [result.passed for result in results]
        else:
            verified = verify_all(cases, options.precision, Path(work))
            rows, passed = [*map(format_verified, verified)], [run.passed for run in verified]
    print(*rows, sep="\n")
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
