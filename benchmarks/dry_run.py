"""Measure time and memory of a dry run of one rank for large published models.

python -m benchmarks.dry_run
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYOUTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "GPT-3 175B, pp8 x dp16 x tp8, 24 micro-batches of 4": (
        {
            "model": {"preset": "megatron-175b"},
            "layout": {"pp": 8, "dp": 16, "tp": 8, "sequence_parallel": True},
            "train": {"global_batch": 1536, "micro_batches": 24, "seq_len": 2048, "precision": "bf16"},
        },
        (0, 17, 1023),
    ),
    "Llama-3 405B, tp8 x pp16 x dp128, 16 micro-batches of 1": (
        {
            "model": {"preset": "llama3-405b"},
            "layout": {"tp": 8, "pp": 16, "dp": 128, "zero": 2, "sequence_parallel": True},
            "train": {"global_batch": 2048, "micro_batches": 16, "seq_len": 8192, "precision": "bf16"},
        },
        (0, 8191, 16383),
    ),
}
DRY_RUN_SCRIPT = """
import resource, runpy, sys
sys.argv = ["workers.dry_run", *sys.argv[1:]]
try:
    runpy.run_module("workers.dry_run", run_name="__main__")
except SystemExit as end:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    raise
"""


def main() -> int:
    wrong = 0
    for name, (spec, ranks) in LAYOUTS.items():
        print(name)
        for rank in ranks:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "spec.json")
                path.write_text(json.dumps(spec))
                argv = [sys.executable, "-c", DRY_RUN_SCRIPT, "--spec", str(path), "--ranks", str(rank), "--json"]
                done = subprocess.run(argv, capture_output=True, text=True, check=False)
            found, resident = done.stdout.splitlines()
            item = json.loads(found)
            wrong += done.returncode
            calls = sum(row["measured_count"] for row in item["collectives"])
            payload = sum(row["measured_bytes"] for row in item["collectives"])
            verdict = "WRONG" if done.returncode else "as predicted"
            print(
                f"  rank {rank:>6}: {item['seconds']:>5.1f} s, {int(resident) / 1e9:.2f} GB; "
                f"{calls:,} calls, {payload:,} B, {verdict}"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
