"""Predicted against measured on this machine: step time after a calibration, and the peak memory of a rank.

    python -m benchmarks.calibration

Calibrates with 4 ranks, then trains 12 layouts under torchrun. Step time: the median of the steps after the first five.
Memory: how far the peak of a rank's resident set lies above what it was before the model was built.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from planner.calibration import cluster_of
from planner.memory import memory
from planner.parse import parse_spec
from planner.profile import HostProfile
from planner.spec import JobSpec
from planner.timing import Timer
from tests.support.processes import ROOT

WARM_UP = 5
STEPS = 25
LAYOUTS: list[tuple[str, dict[str, Any], int, int]] = [
    ("gpt-tiny", {}, 8, 1),
    ("gpt-tiny", {"dp": 2}, 8, 1),
    ("gpt-tiny", {"dp": 4}, 16, 2),
    ("gpt-tiny", {"tp": 2}, 8, 1),
    ("gpt-tiny", {"tp": 4}, 8, 2),
    ("gpt-mini", {"pp": 2}, 8, 4),
    ("gpt-mini", {"dp": 2, "tp": 2}, 8, 1),
    ("gpt-mini", {"pp": 2, "tp": 2}, 8, 2),
    ("gpt-mini", {"dp": 2, "pp": 2}, 8, 2),
    ("llama-tiny", {"dp": 4, "zero": 3}, 16, 1),
    ("llama-tiny", {"dp": 2, "tp": 2, "zero": 1, "sequence_parallel": True}, 8, 2),
    ("llama-mini", {"pp": 4}, 8, 4),
]


class Run(NamedTuple):
    """Median seconds of a step, and rank 0's peak above its start in bytes."""

    step_s: float
    memory_bytes: int


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600
    )


def calibrate(folder: Path) -> HostProfile:
    out = folder / "profile.json"
    torchrun(4, "-m", "workers.calibrate", "--out", str(out))
    return HostProfile.model_validate_json(out.read_text())


def train(spec: JobSpec, folder: Path) -> Run:
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json())
    peaks = folder / "peak"
    done = torchrun(
        spec.layout.world_size,
        *("-m", "benchmarks.peak", str(peaks), "--spec", str(path), "--data-root", str(folder)),
    )
    speeds = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) tokens/s", done.stdout)][WARM_UP:]
    tokens = spec.train.global_batch * spec.train.seq_len
    return Run(median(tokens / speed for speed in speeds), json.loads(peaks.read_text()))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = calibrate(folder)
        timer = Timer(cluster_of("this machine", profile))
        print(f"{'layout':<62} {'step':>9} {'predicted':>9} {'off':>7} {'memory':>9} {'predicted':>9} {'off':>7}")
        off_time, off_memory = [], []
        for preset, layout, batch, m in LAYOUTS:
            sizes = {"global_batch": batch, "micro_batches": m, "seq_len": 128, "steps": STEPS, "eval_every": 0}
            spec = parse_spec({"model": {"preset": preset}, "layout": layout, "train": sizes})
            run = train(spec, folder)
            step = timer.step(spec).step_s
            held = sum(memory(spec, 0).values())
            off_time.append(step / run.step_s - 1)
            off_memory.append(held / run.memory_bytes - 1)
            words = " ".join(f"{axis} {value}" for axis, value in layout.items()) or "one rank"
            print(
                f"{preset + ', ' + words + f', {m} micro-batches':<62} {run.step_s * 1e3:>6.1f} ms"
                f" {step * 1e3:>6.1f} ms {off_time[-1]:>+7.1%} {run.memory_bytes / 2**20:>5.1f} MiB"
                f" {held / 2**20:>5.1f} MiB {off_memory[-1]:>+7.1%}"
            )
        for what, off in (("step time", off_time), ("memory", off_memory)):
            size = [abs(x) for x in off]
            print(f"{what}: median error {median(size):.1%}, worst {max(size):.1%}")


if __name__ == "__main__":
    main()
