"""Compare the trainer with a plain DDP loop of the same model, and measure how long a checkpoint delays a step.

    python -m benchmarks.training [--blocks N]

Two gloo ranks with one thread each train gpt-mini. The sides take turns in the same processes, so a slow moment
affects both. The trainer's step is metered and has the global loss, the gradient norm, and clipping. The plain loop has
`DistributedDataParallel`, cross-entropy, `clip_grad_norm_`, and AdamW. Ratios are those of medians. A checkpoint is
saved in the background, saved synchronously, or not saved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from planner.facts.layout import Coordinates
from planner.facts.model_shapes import get_chunk_units
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from workers.checkpoint.manager import Saver, SaveResult
from workers.meter import Recorder, register_metered_backend
from workers.meter.rank_exit import run_and_exit
from workers.trainer.__main__ import checkpoint_group
from workers.trainer.dataset import load_job_dataset
from workers.trainer.model import Decoder, Strategy, init_weights
from workers.trainer.optimizer import BETAS
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.trainer import Trainer

WORLD = 2
STEPS_PER_TURN = 4
SPEC = {
    "model": {"preset": "gpt-mini"},
    "layout": {"dp": WORLD},
    "train": {"global_batch": 8, "micro_batches": 1, "seq_len": 128, "steps": 100_000, "checkpoint_every": 4},
}


def build_trainer(spec: JobSpec, recorder: Recorder, data_root: Path) -> Trainer:
    mesh, device = build_mesh(spec, recorder.rank, recorder.label_group), torch.device("cpu")
    return Trainer.build(spec, mesh, load_job_dataset(spec, data_root), recorder, device)


def build_ddp_loop(spec: JobSpec, trainer: Trainer) -> Callable[[int], None]:
    """Return a step of a plain DDP loop with the same decoder and batches."""
    layers = range(spec.model.num_layers)
    decoder = Decoder(spec.model, layers, Strategy(), torch.float32, first=True, last=True)
    for unit in get_chunk_units(spec.model, layers, first=True, last=True):
        init_weights(decoder, unit, spec, Coordinates())
    model = DistributedDataParallel(decoder, process_group=dist.new_group(backend="gloo"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, fused=True)
    train, share = spec.train, spec.train.global_batch // WORLD
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)

    def step(index: int) -> None:
        batch = torch.from_numpy(trainer.dataset.train_batch(1, index, train.global_batch, rows, train.seq_len))
        F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_turn(turn: Callable[[int], object], first: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for index in range(first, first + STEPS_PER_TURN):
        turn(index)
    dist.barrier()
    return (time.perf_counter() - started) / STEPS_PER_TURN


def rank_main(blocks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    spec = parse_fields(SPEC)
    recorder = Recorder(int(os.environ["RANK"]))
    dist.init_process_group(register_metered_backend(recorder, "cpu"))
    trainer = build_trainer(spec, recorder, folder)
    hand = build_ddp_loop(spec, trainer)
    saved: list[SaveResult] = []
    saver = Saver(spec, trainer.mesh.coordinates, recorder.rank, folder / "1", checkpoint_group(recorder), saved.append)

    def saving(index: int, *, wait: bool) -> None:
        trainer.train_step(index)
        if index % STEPS_PER_TURN == 0:
            saver.save(index + 1, trainer.model, trainer.optimizer)
        if wait:
            saver.wait()

    def beside(index: int) -> None:
        saving(index, wait=False)

    def at_once(index: int) -> None:
        saving(index, wait=True)

    turns: dict[str, Callable[[int], object]] = {
        "plain DDP loop": hand,
        "trainer": trainer.train_step,
        "plain loop, repeated": hand,
        "async checkpoints": beside,
        "sync checkpoints": at_once,
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    for block in range(blocks + 1):
        for name, turn in turns.items():
            took = time_turn(turn, block * STEPS_PER_TURN)
            saver.wait()
            if block:  # the first warms up
                times[name].append(took)
    saver.close()
    if recorder.rank == 0:
        print_report(spec, {name: statistics.median(values) for name, values in times.items()}, saved)
    dist.destroy_process_group()


def print_report(spec: JobSpec, step_s: dict[str, float], saved: list[SaveResult]) -> None:
    tokens = spec.train.global_batch * spec.train.seq_len
    plain = statistics.mean((step_s["plain DDP loop"], step_s["plain loop, repeated"]))
    for name, seconds in step_s.items():
        print(f"{name:<22}{seconds * 1e3:>9.1f} ms/step {tokens / seconds:>10,.0f} tokens/s")
    print(f"trainer tokens/s divided by plain DDP loop: {plain / step_s['trainer']:.3f} (goal 1.0)")
    print(f"noise of the plain loop: {abs(step_s['plain DDP loop'] / step_s['plain loop, repeated'] - 1):.1%}")
    for name in ("async checkpoints", "sync checkpoints"):
        waits = (step_s[name] - step_s["trainer"]) * STEPS_PER_TURN
        print(f"{name}: {waits * 1e3:.0f} ms more per checkpoint and {STEPS_PER_TURN} steps")
    stall, save = (statistics.median(getattr(s, name) for s in saved) for name in ("stall_s", "save_s"))
    print(
        f"training waits {stall * 1e3:.1f} ms for the copy; writing takes {save * 1e3:.0f} ms, "
        f"{saved[-1].num_bytes / 1e6:.0f} MB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        rank_main(options.blocks, options.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        argv = [*torchrun, *meeting, "-m", "benchmarks.training", "--blocks", str(options.blocks), "--folder", folder]
        return subprocess.run(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    run_and_exit(main)
