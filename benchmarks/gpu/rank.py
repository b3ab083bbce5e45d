"""Parse arguments, set up the device, and write the result of a part's program."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.results import PartOutput, write_atomically
from workers.meter import Recorder, register_metered_backend


def build_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--limit", type=float, required=True, help="seconds after which this process ends itself")
    return parser


def set_up_device(options: argparse.Namespace) -> torch.device:
    """Return the device of this rank. The rank ends with its parent."""
    faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.stderr)
    if options.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    return select_gpu(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def init_metered_group(device: torch.device) -> Recorder:
    """Initialize the default group, and return its meter."""
    recorder = Recorder(int(os.environ["RANK"]))
    dist.init_process_group(register_metered_backend(recorder, device.type))
    return recorder


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_result(out: Path, found: PartOutput) -> None:
    write_atomically(out, found)


def build_empty_result() -> PartOutput:
    return PartOutput(measured={}, beside={}, wrong=[], notes=[])


# Settings of a rank that shares its GPU. NCCL rejects two ranks of one host on one GPU. Each rank therefore has its
# own NCCL host, and all its traffic uses sockets of the loopback interface.
SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def select_gpu(rank: int, ranks: int) -> torch.device:
    """Select the GPU of this rank, before NCCL reads its environment."""
    count = torch.cuda.device_count()
    if ranks > count:
        separate_nccl_host(rank)
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def separate_nccl_host(rank: int) -> None:
    """Make this rank its own NCCL host."""
    os.environ.update(SOCKETS, NCCL_HOSTID=f"rank-{rank}")
