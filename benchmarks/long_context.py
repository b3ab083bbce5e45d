"""Compare peak memory with a dry run, and gradients with a single process, for one long sequence with CP.

    python -m benchmarks.long_context [--seq-len 8192] [--cp 4] [--method ring] [--preset llama-mini]

Gloo ranks with one thread each run the first backward of a step, as the single-process reference does. The peak counts
live tensors of a rank, in the real run and in the dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.cost.memory import get_memory
from planner.facts.parse_spec import parse_fields
from planner.facts.spec import JobSpec
from tests.parity.compare import gradient_difference, whole_gradients
from workers.dry_run import MemoryAndFlopCounter, run_dry_step
from workers.meter import Recorder, register_metered_backend
from workers.meter.rank_exit import run_and_exit
from workers.torch_private.fsdp import watch_storage
from workers.trainer.dataset import load_job_dataset
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.parallel.parallelize import parallelize
from workers.trainer.trainer import Trainer

MEMORY_GOAL, GRADIENT_GOAL = 0.025, 1e-5


def build_spec(options: argparse.Namespace, layout: dict[str, Any]) -> JobSpec:
    train = {"global_batch": 1, "seq_len": options.seq_len}
    return parse_fields(
        {"model": {"preset": options.preset, "max_seq_len": options.seq_len}, "layout": layout, "train": train}
    )


def rank_main(spec: JobSpec, folder: Path) -> None:
    """Run a backward of this rank, and write its gradients and peak bytes to `folder`."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    recorder, device = Recorder(rank), torch.device("cpu")
    dist.init_process_group(register_metered_backend(recorder, "cpu"))
    mesh, corpus = build_mesh(spec, rank, recorder.label_group), load_job_dataset(spec, folder)
    watch = MemoryAndFlopCounter()
    with watch, watch_storage(watch.record_resize):
        part = parallelize(spec, mesh, device)
        trainer = Trainer(spec, mesh, part, corpus, recorder, device)
        trainer.forward_backward(0)
        trainer.reduce_statistics()
    torch.save({held.name: held.gradient for held in part.parameters}, folder / f"gradients-{rank}.pt")
    (folder / f"peak-{rank}.json").write_text(json.dumps(watch.read()))
    dist.destroy_process_group()


def run_ranks(spec: JobSpec, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return the whole gradients, and the largest peak bytes of a rank."""
    folder.mkdir()
    file, world = folder / "spec.json", spec.layout.world_size
    file.write_text(spec.model_dump_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    argv = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "benchmarks.long_context"]
    subprocess.run([*argv, "--rank-of", str(file)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    parts = [torch.load(folder / f"gradients-{rank}.pt", weights_only=True) for rank in range(world)]
    peaks = [json.loads((folder / f"peak-{rank}.json").read_text()) for rank in range(world)]
    return whole_gradients(spec, parts), max(peaks)


def compare_runs(options: argparse.Namespace) -> bool:
    spec = build_spec(options, {"cp": options.cp, "cp_method": options.method})
    dry = max(run_dry_step(spec, rank).peak_bytes for rank in range(options.cp))
    with tempfile.TemporaryDirectory() as work:
        gradients, peak = run_ranks(spec, Path(work, "divided"))
        reference, alone = run_ranks(build_spec(options, {}), Path(work, "alone"))
    planned = get_memory(spec, 0)
    difference = gradient_difference(gradients, reference)
    print(f"{options.preset}, {options.seq_len:,} tokens, cp {options.cp} {options.method}")
    print(f"peak of the largest rank {peak / 2**20:,.1f} MiB; dry run {dry / 2**20:,.1f} MiB ({peak / dry - 1:+.1%})")
    predicted = sum(planned.values()) - planned["optimizer"]
    print(f"predicted {predicted / 2**20:,.1f} MiB; single process {alone / 2**20:,.1f} MiB")
    print(f"largest gradient difference from the reference {difference:.1e}")
    return abs(peak / dry - 1) <= MEMORY_GOAL and difference <= GRADIENT_GOAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--method", choices=("ring", "all_gather"), default="ring")
    parser.add_argument("--preset", default="llama-mini")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is None:
        return 0 if compare_runs(options) else 1
    rank_main(parse_fields(json.loads(options.rank_of.read_text())), options.rank_of.parent)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
