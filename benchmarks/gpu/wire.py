"""What NCCL puts on the loopback interface beside what the meter says that ranks have to send.

Ranks are made hosts of their own, so that all they send is seen by the kernel. With `--simple` NCCL adds no flags to
the data, and both must agree; without, what NCCL chose itself is told.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.gpu.metering import collectives, metered
from benchmarks.gpu.rank import arguments, begin, meet, nothing_found, tell, wait
from benchmarks.gpu.results import Found
from benchmarks.gpu.sharing import as_own_host
from contracts.telemetry.items import Op
from planner.facts.collectives import compute_algorithmic_bytes
from workers.meter import Recorder
from workers.meter.rank_exit import run_and_exit

CALLS = 5
NUM_BYTES = (2**20, 2**26)  # of the full buffer
WITHIN = {2**20: 0.05, 2**26: 0.01}  # headers of packets, and what ranks say to each other to meet


def compare(recorder: Recorder, device: torch.device, *, judges: bool) -> Found:
    """All ranks call this together; the answer is rank 0's."""
    found, world = nothing_found(), dist.get_world_size()
    for num_bytes in NUM_BYTES:
        for op, call in collectives(num_bytes, device).items():
            call(False)  # the first connects the ranks
            meet_again(device)
            metered(recorder, op)
            before = interface_bytes()
            for _ in range(CALLS):
                call(False)
            meet_again(device)
            carried = interface_bytes() - before
            ours = metered(recorder, op)
            told = to_send(ours.payload_bytes, op, world)
            name = f"{op}, {num_bytes:,} B: MB of {CALLS} calls"
            found["measured"][name], found["beside"][name] = carried / 1e6, told / 1e6
            if ours.calls != CALLS:
                found["wrong"].append(f"{name}: the meter counts {ours.calls} calls")
            if judges and abs(carried / told - 1) > WITHIN[num_bytes]:
                found["wrong"].append(f"{name}: {carried / told:.3f} of what the meter says")
    return found


def to_send(payload_bytes: int, op: str, world: int) -> int:
    """By all ranks together. Of a broadcast the last passes nothing on, though nccl-tests counts it for each."""
    if op == "broadcast":
        return payload_bytes * (world - 1)
    return compute_algorithmic_bytes(cast(Op, op), payload_bytes, world) * world


def meet_again(device: torch.device) -> None:
    wait(device)
    dist.barrier(device_ids=[device.index])
    wait(device)


def interface_bytes() -> int:
    """Sent over the loopback interface since it is up."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--simple", action="store_true")
    options = parser.parse_args()
    rank, device = int(os.environ["RANK"]), begin(options)
    as_own_host(rank)
    if options.simple:
        os.environ["NCCL_PROTO"] = "Simple"
    recorder = meet(device)
    found = compare(recorder, device, judges=options.simple)
    if rank == 0:
        tell(options.out, found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
