"""Compare bytes on the loopback interface with bytes that ranks send by the meter, for NCCL.

Each rank is its own NCCL host, so the kernel sees all traffic. With `--simple`, NCCL adds no flags to the data,
and the bytes must match. Without it, the ratio of NCCL's own choice is printed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.gpu.metering import build_collectives, drain_meter
from benchmarks.gpu.rank import (
    build_empty_result,
    build_parser,
    init_metered_group,
    separate_nccl_host,
    set_up_device,
    synchronize,
    write_result,
)
from benchmarks.gpu.results import PartOutput
from contracts.telemetry.items import Op
from planner.facts.collectives import compute_algorithmic_bytes
from workers.meter import Recorder
from workers.meter.rank_exit import run_and_exit

CALLS = 5
NUM_BYTES = (2**20, 2**26)  # of the full buffer
MAX_ERRORS = {2**20: 0.05, 2**26: 0.01}  # packet headers, and messages of ranks that connect


def compare_with_interface(recorder: Recorder, device: torch.device, *, judges: bool) -> PartOutput:
    """Compare all collectives. All ranks call this function, and rank 0 returns the result."""
    found, world = build_empty_result(), dist.get_world_size()
    for num_bytes in NUM_BYTES:
        for op, call in build_collectives(num_bytes, device).items():
            call(False)  # the first connects the ranks
            synchronize_ranks(device)
            drain_meter(recorder, op)
            before = read_interface_bytes()
            for _ in range(CALLS):
                call(False)
            synchronize_ranks(device)
            carried = read_interface_bytes() - before
            ours = drain_meter(recorder, op)
            result = compute_sent_bytes(ours.payload_bytes, op, world)
            name = f"{op}, {num_bytes:,} B: MB of {CALLS} calls"
            found["measured"][name], found["beside"][name] = carried / 1e6, result / 1e6
            if ours.calls != CALLS:
                found["wrong"].append(f"{name}: the meter counts {ours.calls} calls")
            if judges and abs(carried / result - 1) > MAX_ERRORS[num_bytes]:
                found["wrong"].append(f"{name}: {carried / result:.3f} of what the meter says")
    return found


def compute_sent_bytes(payload_bytes: int, op: str, world: int) -> int:
    """Return the bytes that all ranks send. The last rank of a broadcast sends none, unlike in nccl-tests."""
    if op == "broadcast":
        return payload_bytes * (world - 1)
    return compute_algorithmic_bytes(cast(Op, op), payload_bytes, world) * world


def synchronize_ranks(device: torch.device) -> None:
    synchronize(device)
    dist.barrier(device_ids=[device.index])
    synchronize(device)


def read_interface_bytes() -> int:
    """Return the bytes sent over the loopback interface since it is up."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--simple", action="store_true")
    options = parser.parse_args()
    rank, device = int(os.environ["RANK"]), set_up_device(options)
    separate_nccl_host(rank)
    if options.simple:
        os.environ["NCCL_PROTO"] = "Simple"
    recorder = init_metered_group(device)
    found = compare_with_interface(recorder, device, judges=options.simple)
    if rank == 0:
        write_result(options.out, found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
