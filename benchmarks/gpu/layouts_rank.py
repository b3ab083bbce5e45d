"""Run the layouts of `benchmarks.gpu.layouts` on one rank, one after the other."""

from __future__ import annotations

import argparse
import functools
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.layouts import LayoutResult, append_result, build_spec
from benchmarks.gpu.rank import select_gpu
from benchmarks.gpu.running import read_clock
from benchmarks.gpu.training import run_training, sum_differences
from planner.facts.single_process_reference import BF16_TOLERANCES, COMPARED_STEPS, get_tolerances
from planner.facts.spec import JobSpec
from tests.parity.cases import LAYOUTS, reference_spec
from workers.meter import Recorder, register_metered_backend
from workers.meter.rank_exit import run_and_exit
from workers.trainer.dataset import load_job_dataset
from workers.trainer.verification.reference import compute_reference

TIMEOUT = timedelta(seconds=40)  # of a collective: then torch ends the rank


def try_layout(name: str, spec: JobSpec, recorder: Recorder, device: torch.device, data: Path) -> LayoutResult:
    """Run a layout on all ranks, and return the result on rank 0."""
    ran = run_training(spec, recorder, device, data, proves=True)
    bytes_off, calls_off = sum_differences(ran)
    if recorder.rank:
        return LayoutResult(name=name)
    assert ran.proof is not None
    one = ran.proof["one_process"]
    losses = zip(ran.steps, compute_cpu_losses(LAYOUTS[name].archs[-1], LAYOUTS[name].variant, data), strict=False)
    from_cpu = max(abs((step["loss"] or 0.0) / other - 1) for step, other in losses)
    wrong = [f"{apart['what']} of {apart['name']} differs by {apart['apart']}" for apart in ran.proof["wrong"]]
    if one["state"] != "equal":
        wrong.append(f"reference: {one['state']} {one['why']}".rstrip())
    limit = get_tolerances(spec).loss if spec.train.precision == "fp32" else BF16_TOLERANCES.loss
    if from_cpu > limit:
        wrong.append(f"losses differ from the CPU's by {from_cpu:.1e} (limit {limit:.0e})")
    if bytes_off or calls_off:
        wrong.append(f"absolute difference {bytes_off:,} B, {calls_off} calls")
    return LayoutResult(
        name=name,
        wrong=wrong,
        gradient=one["gradient"],
        loss=one["loss"],
        loss_from_cpu=from_cpu,
        bytes_off=bytes_off,
        calls_off=calls_off,
    )


@functools.cache
def compute_cpu_losses(arch: str, variant: str, data: Path) -> list[float]:
    """Return the losses of a single-process reference in fp32."""
    spec = reference_spec(arch, variant)
    return [
        result.loss
        for result in compute_reference(spec, load_job_dataset(spec, data), torch.device("cpu"), COMPARED_STEPS).results
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--until", type=float, required=True, help="by `now`: none is begun later")
    parser.add_argument("names", nargs="+", metavar="LAYOUT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = select_gpu(rank, world)
    for index, name in enumerate(options.names):
        store = dist.FileStore(str(options.folder / f"store-{os.getppid()}-{index}"), world)  # type: ignore[attr-defined]
        if rank == 0:
            store.set("goes on", str(read_clock() < options.until))
        if store.get("goes on") != b"True":
            break
        if rank == 0:
            append_result(options.pieces, LayoutResult(name=name))
        backend = register_metered_backend(recorder := Recorder(rank), "cuda")
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        try:
            result = try_layout(name, build_spec(name, options.precision), recorder, device, options.folder)
        finally:
            dist.destroy_process_group()
        if rank == 0:
            append_result(options.pieces, result)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
