"""`python -m workers.calibrate`: measure the speed of a host. Start one process per rank with torchrun."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from contracts.telemetry.results import ProfileItem
from planner.hardware.profile import HostProfile
from workers.calibrate.measurements import (
    WINDOW_S,
    create_active_ranks,
    measure_collectives,
    measure_ends,
    measure_gemms,
    measure_layers,
    measure_optimizer,
    measure_streams,
)
from workers.device import get_device_name, get_local_device
from workers.meter import Recorder, register_metered_backend
from workers.meter.exporter import add_telemetry_options, open_exporter
from workers.meter.rank_exit import print_line, run_and_exit
from workers.rank_environment import get_group_timeout
from workers.trainer.memory import configure_large_allocations, limit_primitive_cache, use_single_heap


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.calibrate", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds per compute measurement")
    parser.add_argument("--out", type=Path, help="file to write the profile to")
    add_telemetry_options(parser)
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    with open_exporter(Recorder(rank), options) as send:
        profile = run(options.device, options.window)
        if profile is not None and options.out is not None:
            options.out.write_text(profile.model_dump_json(indent=1))
        if profile is not None:
            content = profile.model_dump(mode="json")
            send(ProfileItem(kind="profile", rank=rank, time=time.time(), profile=content))
    return 0


def run(device_type: str, window_s: float) -> HostProfile | None:
    """Measure all points. Return the profile on rank 0, None on the others."""
    configure_large_allocations()  # as in the trainer, so that a large tensor gets new pages
    device = get_local_device(device_type)
    backend = "cpu:gloo,cuda:nccl"
    if device_type == "cpu":  # as in a job, because on shared cores the callbacks of the meter compete with compute
        backend = register_metered_backend(Recorder(int(os.environ["RANK"])), "cpu")
        use_single_heap()
        limit_primitive_cache()
    dist.init_process_group(backend, timeout=get_group_timeout())
    try:
        return _measure(device, window_s)
    finally:
        dist.destroy_process_group()


def _measure(device: torch.device, window_s: float) -> HostProfile | None:
    world, started = dist.get_world_size(), time.monotonic()
    log: Callable[[str], None] = print_line if dist.get_rank() == 0 else lambda _line: None
    counts = [n for n in (1, 2, 4, 8, 16) if n < world] + [world]
    measurements = {
        "gemm": measure_gemms,
        "stream": measure_streams,
        "layers": measure_layers,
        "ends": measure_ends,
        "optimizer": measure_optimizer,
    }
    points: dict[str, list[object]] = {name: [] for name in measurements}
    collectives = []
    for index, ranks in enumerate(counts, start=1):
        active = create_active_ranks(ranks, device, window_s)
        for name, measure in measurements.items():
            log(f"{index}/{len(counts)}: {name} with {ranks} of {world} ranks active, {_format_elapsed(started)}")
            points[name] += list(measure(active))
        collectives += list(measure_collectives(active, log))
    log(f"measured in {_format_elapsed(started)}")
    if dist.get_rank() != 0:
        return None
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world
    if device.type == "cuda":
        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return HostProfile.model_validate(
        {
            "device": device.type,
            "device_name": get_device_name(device),
            "torch_version": torch.__version__,
            "cores": os.cpu_count() or 1,
            "slots": world,
            "memory_bytes": memory_bytes,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **{name: tuple(measured) for name, measured in points.items()},
            "collectives": tuple(collectives),
        }
    )


def _format_elapsed(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


if __name__ == "__main__":
    run_and_exit(main)
