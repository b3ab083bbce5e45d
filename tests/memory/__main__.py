"""`python -m tests.memory --layouts 300`: the table of docs/notebook/2026-11.md; 1 where a goal is missed."""

from __future__ import annotations

import argparse
import sys
from itertools import islice

from tests.memory.cases import specs
from tests.memory.compare import Found, found

MOST_OFF, USUALLY, SHARE = 0.05, 0.025, 0.95
WORST = 12


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    parser.add_argument("--layouts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="whose kernels are planned for")
    options = parser.parse_args()
    drawn = islice(specs(options.seed, options.device), options.layouts)
    rows = [row for spec in drawn for row in found(spec)]
    print(table(rows))
    return 0 if holds(rows) else 1


def holds(rows: list[Found]) -> bool:
    off = [abs(row.off) for row in rows]
    return max(off) <= MOST_OFF and sum(x <= USUALLY for x in off) >= SHARE * len(off)


def table(rows: list[Found]) -> str:
    off = sorted(abs(row.off) for row in rows)
    within = sum(x <= USUALLY for x in off) / len(off)
    lines = [
        f"{len(rows)} stages of {len({id(row.spec) for row in rows})} layouts: median {off[len(off) // 2]:.2%} off, "
        f"95% within {off[int(0.95 * (len(off) - 1))]:.2%}, worst {off[-1]:.2%}; {within:.1%} within {USUALLY:.1%}",
        "",
        "| off | stage | measured | layout |",
        "|---|---|---|---|",
    ]
    worst = sorted(rows, key=lambda row: -abs(row.off))[:WORST]
    lines += [f"| {row.off:+.2%} | {row.stage} | {row.measured / 2**20:,.0f} MiB | {row.words} |" for row in worst]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
