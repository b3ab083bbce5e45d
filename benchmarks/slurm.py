"""Compare the time to the first step on Slurm between a job of the board and sbatch with srun and torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster, cluster, get_missing_requirement
from tests.slurm.installation import Installation, installation
from tests.support.processes import ROOT, wait_until

ROUNDS = 3
SPEC: dict[str, Any] = {
    "name": "bench",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 2, "warmup_steps": 1, "eval_every": 0},
}
FIRST_STEP = "step 1/2 loss"


def measure_sbatch(slurm: Cluster, folder: Path) -> float:
    """Return seconds from sbatch with a hand-written script to the first step of rank 0."""
    spec = folder / "spec.json"
    spec.write_text(json.dumps(SPEC))
    ranks = "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0"
    trainer = f"-m workers.trainer --spec {spec} --data-root {folder}"
    script = (
        f"#!/bin/sh\nexport OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH={ROOT}\n"
        f"srun {sys.executable} -m torch.distributed.run {ranks} {trainer}\nexit $?\n"
    )
    started = time.monotonic()
    job = slurm.submit_script(script, "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=4")
    log = slurm.folder / f"{job}.out"
    try:
        wait_until(lambda: log.exists() and FIRST_STEP in log.read_text(), "bare torchrun makes a step", 60, 0.01)
    except AssertionError:
        print(log.read_text() if log.exists() else "no output")
        raise
    elapsed = time.monotonic() - started
    wait_until(lambda: slurm.get_job_state(job) == "COMPLETED", "it ends", 60)
    return elapsed


def measure_submit(installed: Installation) -> float:
    """Return seconds from the REST call to the first step of rank 0."""
    started = time.monotonic()
    job = installed.board.submit({**SPEC, "resources": {"engine": "slurm"}})

    def stepped() -> bool:
        logs = (installed.folder / "runs").glob(f"*/*/{job}/1/logs/**/attempt_*/0/stdout.log")
        return any(FIRST_STEP in log.read_text() for log in logs)

    wait_until(stepped, "the job makes a step", 120, 0.01)
    elapsed = time.monotonic() - started
    installed.board.wait_for_status(job, "succeeded")
    return elapsed


def main() -> int:
    if reason := get_missing_requirement():
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as work, cluster(Path(work) / "slurm", 1) as slurm:
        folder = Path(work) / "board"
        folder.mkdir()
        with installation(slurm, folder) as installed:
            measure_sbatch(slurm, folder)  # fills the page cache and the corpus cache
            measure_submit(installed)
            pairs = []
            for _ in range(ROUNDS):
                slurm.settle()
                theirs = measure_sbatch(slurm, folder)
                slurm.settle()
                pairs.append((theirs, measure_submit(installed)))
    ratios = [ours / theirs for theirs, ours in pairs]
    print(f"bare sbatch + srun + torchrun to first step: median {statistics.median(t for t, _ in pairs):.2f} s")
    print(f"submit to first step:                        median {statistics.median(o for _, o in pairs):.2f} s")
    print(f"ratio: median {statistics.median(ratios):.3f} [{min(ratios):.3f} to {max(ratios):.3f}], {ROUNDS} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
