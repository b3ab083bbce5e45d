"""Compare the time to the first step of a submitted job with torchrun, alternating in one run. `make bench-launch`."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.board import Board, run_board
from tests.support.processes import ROOT, wait_until

ROUNDS = 4
SPEC: dict[str, Any] = {
    "name": "bench",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 2, "warmup_steps": 1, "eval_every": 0},
}


def measure_torchrun(folder: Path) -> float:
    """Return seconds from the start of torchrun to the first step of rank 0."""
    spec = folder / "spec.json"
    spec.write_text(json.dumps(SPEC))
    log = folder / f"bare-{time.monotonic_ns()}.log"
    ranks = ["--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    trainer = ["-m", "workers.trainer", "--spec", str(spec), "--data-root", str(folder)]
    argv = [sys.executable, "-m", "torch.distributed.run", *ranks, *trainer]
    started = time.monotonic()
    with log.open("wb") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(lambda: "step 1/2 loss" in log.read_text(), "bare torchrun makes a step", 60, 0.01)
        elapsed = time.monotonic() - started
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return elapsed


def measure_submit(installation: Board) -> float:
    """Return seconds from the REST call to the first step of rank 0."""
    started = time.monotonic()
    job = installation.submit(SPEC)
    installation.wait_for_line(job, "step 1/2 loss")
    elapsed = time.monotonic() - started
    installation.wait_for_status(job, "succeeded")
    return elapsed


def main() -> None:
    with tempfile.TemporaryDirectory() as work, run_board(Path(work) / "var") as installation:
        measure_torchrun(Path(work))  # fills the page cache and the corpus cache
        measure_submit(installation)
        pairs = [(measure_torchrun(Path(work)), measure_submit(installation)) for _ in range(ROUNDS)]
    ratios = [ours / theirs for theirs, ours in pairs]
    print(f"bare torchrun to first step: median {statistics.median(t for t, _ in pairs):.2f} s")
    print(f"submit to first step:        median {statistics.median(o for _, o in pairs):.2f} s")
    print(f"ratio: median {statistics.median(ratios):.3f} [{min(ratios):.3f} to {max(ratios):.3f}], {ROUNDS} pairs")


if __name__ == "__main__":
    main()
