"""Print the memory table of docs/notebook/2026-11.md, and exit with 1 if a goal is missed.

python -m tests.memory --layouts 300
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice

from tests.memory.cases import generate_specs
from tests.memory.compare import StageComparison, compare_stages

MOST_OFF, USUALLY, SHARE = 0.05, 0.025, 0.95
MAX_LISTED_STAGES = 12


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels are planned for")
    options = parser.parse_args()
    drawn = islice(generate_specs(options.seed, options.device), options.layouts)
    rows = [row for spec in drawn for row in compare_stages(spec)]
    print(print_table(rows))
    return 0 if check_goals(rows) else 1


def check_goals(rows: list[StageComparison]) -> bool:
    off = [abs(row.error) for row in rows]
    return max(off) <= MOST_OFF and sum(x <= USUALLY for x in off) >= SHARE * len(off)


def print_table(rows: list[StageComparison]) -> str:
    off = sorted(abs(row.error) for row in rows)
    within = sum(x <= USUALLY for x in off) / len(off)
    lines = [
        f"{len(rows)} stages of {len({id(row.spec) for row in rows})} layouts: median {off[len(off) // 2]:.2%} off, "
        f"95% within {off[int(0.95 * (len(off) - 1))]:.2%}, worst {off[-1]:.2%}; {within:.1%} within {USUALLY:.1%}",
        "",
        "| off | stage | measured | layout |",
        "|---|---|---|---|",
    ]
    worst = sorted(rows, key=lambda row: -abs(row.error))[:MAX_LISTED_STAGES]
    lines += [f"| {row.error:+.2%} | {row.stage} | {row.measured / 2**20:,.0f} MiB | {row.describe} |" for row in worst]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
