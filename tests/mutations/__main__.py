"""Run faults in fp32 and bf16, and print the checks that report them.

Arguments select faults by name. `blind` selects all blind faults. Without arguments, all other faults run. If no check
of a run reports a fault, the test against a second implementation runs on the faulty trainer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutations.blind_faults import BLIND_FAULTS
from tests.mutations.faults import FAULTS
from tests.mutations.run import RunChecks, differs_from_second_implementation, try_fault

ALL_FAULTS = {**FAULTS, **BLIND_FAULTS}
HEADER = "| Fault | Run | Bytes and calls | Replicas | Reference | First report |\n|---|---|---|---|---|---|"


def format_row(name: str, precision: str, told: RunChecks, by_test: bool) -> str:
    fault = ALL_FAULTS[name]
    layout = " ".join((*(f"{key}={value}" for key, value in fault.layout.items()), precision))
    traffic = "-" if told.wrong_bytes is None else f"{told.wrong_bytes:,} B, {told.wrong_calls}"
    seen = told.detected_by
    replicas = "differ" if "replicas" in seen else "match" if told.replicas else "-"
    one = "differs" if "one process" in seen else "equal" if told.one_process.startswith("gradients, ") else "-"
    if "one step more" in seen:
        one = "differs at the end"
    rest = "traffic check" if seen else "second implementation" if by_test else "NOT FOUND"
    first = told.failed.split("; ")[0] or told.ended or rest
    first = first.replace("|", "/")[:160]
    return f"| {name} | {fault.arch} {layout} | {traffic} | {replicas} | {one} | {first} |"


def main() -> int:
    chosen = {*sys.argv[1:]} or {*FAULTS}
    if "blind" in chosen:
        chosen |= {*BLIND_FAULTS}
    names = [name for name in ALL_FAULTS if name in chosen]
    runs = dict.fromkeys(
        (name, ALL_FAULTS[name].train.get("precision", each)) for name in names for each in ALL_FAULTS[name].precisions
    )
    unseen = 0
    print(HEADER)
    for name, precision in runs:
        with tempfile.TemporaryDirectory() as work:
            result = try_fault(ALL_FAULTS[name], Path(work), precision)
            by_test = not result.detected_by and differs_from_second_implementation(Path(work) / "tree")
        print(format_row(name, precision, result, by_test), flush=True)
        unseen += not result.detected_by and not by_test
    print(f"{len(runs) - unseen} passed, {unseen} failed")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
