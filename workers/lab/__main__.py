"""`python -m workers.lab --spec FILE`: benchmark collectives. Start one process per rank with torchrun."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from contracts.telemetry.results import LabItem
from planner.facts.collectives import LabResult, get_lab_ranks, get_lab_spec
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.facts.validation import SpecError
from workers.device import get_device_name, get_local_device
from workers.lab.measure import LabGroup, measure_points, record_steps
from workers.lab.primitives import RankContext, build_pattern
from workers.meter import Recorder, register_metered_backend
from workers.meter.exporter import add_telemetry_options, open_exporter
from workers.meter.rank_exit import fail, print_line, run_and_exit
from workers.rank_environment import get_group_timeout

IDLE_TIMEOUT = timedelta(days=1)  # ranks outside the group wait for the end of the benchmark
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.lab", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file with the job spec")
    parser.add_argument("--out", type=Path, help="file to write the result to")
    add_telemetry_options(parser)
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        spec = parse_spec(json.loads(options.spec.read_text()))
    except (OSError, ValueError, SpecError) as error:
        return fail(f"`--spec` is invalid: {error}", 1)
    if spec.kind != "lab" or spec.layout.world_size != world:
        received = f"a {spec.kind} of {spec.layout.world_size} ranks"
        return fail(f"`--spec` is {received}, but torchrun started a benchmark of {world} ranks.", 1)
    recorder = Recorder(rank)
    with open_exporter(recorder, options) as send:
        result = run(spec, recorder)
        if result is not None and options.out is not None:
            options.out.write_text(result.model_dump_json(indent=1))
        if result is not None:
            content = result.model_dump(mode="json")
            send(LabItem(kind="lab", rank=rank, time=time.time(), result=content))
    for point in () if result is None else result.points:
        if point.wrong:
            found = f"{point.wrong} of {point.checked} elements are wrong"
            return fail(f"{point.primitive} of {point.num_bytes} B: {found}", 1)
    return 0


def run(spec: JobSpec, recorder: Recorder) -> LabResult | None:
    """Run the benchmark. Return the result on the first rank of the group, None on the others."""
    device = get_local_device(spec.resources.device)
    dist.init_process_group(register_metered_backend(recorder, device.type), timeout=get_group_timeout())
    try:
        ranks = get_lab_ranks(spec)
        group = dist.new_group(list(ranks), timeout=get_group_timeout(), sort_ranks=False)
        control = dist.new_group(list(ranks), backend="gloo", timeout=get_group_timeout(), sort_ranks=False)
        all_ranks = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        result = None
        if isinstance(group, dist.ProcessGroup) and isinstance(control, dist.ProcessGroup):
            recorder.label_group(group.group_name, "dp")
            recorder.set_phase("step")
            result = _measure(spec, LabGroup(group, control, recorder), device)
            recorder.set_phase("teardown")
        dist.barrier(all_ranks)
        return result
    finally:
        dist.destroy_process_group()


def _measure(spec: JobSpec, lab_group: LabGroup, device: torch.device) -> LabResult | None:
    lab, ranks = get_lab_spec(spec), get_lab_ranks(spec)
    root = ranks[0] if lab.root is None else lab.root
    context = RankContext(
        ranks=ranks,
        group_rank=lab_group.group.rank(),
        root=ranks.index(root),
        device=device,
        dtype=getattr(torch, lab.dtype),
        reduce_op=lab.reduce_op,
        fill=build_pattern(lab.dtype, len(ranks)),
    )
    log: Callable[[str], None] = print_line if context.group_rank == 0 else lambda _line: None
    recorded_steps = tuple(record_steps(lab_group, context, lab.primitives))
    measured_points = tuple(measure_points(lab_group, context, lab, log))
    if context.group_rank != 0:
        return None
    return LabResult(
        device=spec.resources.device,
        device_name=get_device_name(device),
        backend=BACKENDS[device.type],
        torch_version=torch.__version__,
        world_size=spec.layout.world_size,
        ranks=ranks,
        root=root,
        dtype=lab.dtype,
        reduce_op=lab.reduce_op,
        iterations=lab.iterations,
        points=measured_points,
        steps=recorded_steps,
    )


if __name__ == "__main__":
    run_and_exit(main)
