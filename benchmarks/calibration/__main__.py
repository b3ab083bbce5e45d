"""Compare predicted with measured step times and peak memory on this machine, after a calibration.

    python -m benchmarks.calibration

Calibrates with 4 ranks, then trains 12 layouts under torchrun. The step time is the median of steps after the first
five. The memory is the rise of the resident set of rank 0 since before the model was built. The planner's share for the
allocator was fitted on these six layouts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from planner.cost.memory import get_memory
from planner.cost.timing import Timer
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.hardware.calibration import build_cluster
from planner.hardware.catalog import CLUSTERS
from planner.hardware.profile import HostProfile
from tests.support.processes import ROOT

PASSES = 4000
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

LARGE: list[tuple[str, dict[str, Any], int, int]] = [
    ("gpt2", {}, 4, 1),
    ("gpt2", {}, 8, 2),
    ("gpt2", {"dp": 2}, 4, 1),
    ("gpt2", {"dp": 2, "zero": 1}, 4, 1),
    ("gpt2", {"dp": 2, "zero": 3}, 4, 1),
    ("gpt2", {"pp": 2}, 4, 2),
]


def build_torchrun_command(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=600
    )


def calibrate(folder: Path) -> HostProfile:
    out = folder / "profile.json"
    build_torchrun_command(4, "-m", "workers.calibrate", "--out", str(out))
    return HostProfile.model_validate_json(out.read_text())


def measure_step_s(spec: JobSpec, folder: Path) -> float:
    """Return the median step time of a run."""
    done = build_torchrun_command(spec.layout.world_size, "-m", "workers.trainer", *_arguments(spec, folder))
    speeds = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) tokens/s", done.stdout)]
    tokens = spec.train.global_batch * spec.train.seq_len
    return median(tokens / speed for speed in speeds[WARM_UP:])


def measure_peak_bytes(spec: JobSpec, folder: Path) -> int:
    """Return the rise of the resident set of rank 0 since before the model was built."""
    out = folder / "peak"
    build_torchrun_command(
        spec.layout.world_size, "-m", "benchmarks.calibration.peak", str(out), *_arguments(spec, folder)
    )
    return int(json.loads(out.read_text()))


def _arguments(spec: JobSpec, folder: Path) -> list[str]:
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json())
    return ["--spec", str(path), "--data-root", str(folder)]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        compare_step_times(Path(name))
        compare_peaks(Path(name))


def compare_step_times(folder: Path) -> None:
    before = measure_pass_s()
    timer = Timer(build_cluster("this machine", calibrate(folder)))
    calibrated = measure_pass_s()
    print(f"{'step time after a calibration':<66} {'measured':>10} {'predicted':>10} {'error':>7}")
    off = []
    for preset, layout, batch, m in LAYOUTS:
        spec = build_spec(preset, layout, batch, m, STEPS)
        measured, predicted = measure_step_s(spec, folder), timer.get_step(spec).step_s
        off.append(predicted / measured - 1)
        print(f"{format_layout(spec):<66} {measured * 1e3:>7.1f} ms {predicted * 1e3:>7.1f} ms {off[-1]:>+7.1%}")
    print_summary(off)
    moved = " and ".join(f"{after / before - 1:+.0%}" for after in (calibrated, measure_pass_s()))
    print(f"machine speed: time of a memory pass {moved}, after the calibration and at the end")


def measure_pass_s() -> float:
    """Return the median time of a pass over 4 MB on one core, which shows the current speed of this machine."""
    x, took = torch.ones(2**20), []
    for _ in range(PASSES):
        started = time.perf_counter()
        x.mul_(1.0)
        took.append(time.perf_counter() - started)
    return median(took)


def compare_peaks(folder: Path) -> None:
    print(f"\n{'peak memory of rank 0 above its start':<66} {'measured':>10} {'predicted':>10} {'error':>7}")
    off, cpu = [], CLUSTERS["cpu"].accelerator
    for preset, layout, batch, m in LARGE:
        spec = build_spec(preset, layout, batch, m, 3)
        measured, tensors = measure_peak_bytes(spec, folder), sum(get_memory(spec, 0).values())
        predicted = tensors + cpu.compute_overhead_bytes(tensors) - cpu.reserved_bytes
        off.append(predicted / measured - 1)
        print(f"{format_layout(spec):<66} {measured / 2**20:>6.0f} MiB {predicted / 2**20:>6.0f} MiB {off[-1]:>+7.1%}")
    print_summary(off)


def build_spec(preset: str, layout: dict[str, Any], batch: int, m: int, steps: int) -> JobSpec:
    train = {"global_batch": batch, "micro_batches": m, "seq_len": 128, "steps": steps, "eval_every": 0}
    # the single-process reference on rank 0 would add to its resident set
    alone = {"warmup_steps": 1, "verify": "off"}
    return parse_spec({"model": {"preset": preset}, "layout": layout, "train": {**train, **alone}})


def format_layout(spec: JobSpec) -> str:
    arguments = spec.layout.model_dump(exclude_defaults=True)
    layout = " ".join(f"{name} {value}" for name, value in arguments.items()) or "one rank"
    return f"{spec.model.preset}, {layout}, {spec.train.micro_batches} micro-batches"


def print_summary(off: list[float]) -> None:
    size = [abs(x) for x in off]
    print(f"median error {median(size):.1%}, worst {max(size):.1%}")


if __name__ == "__main__":
    main()
