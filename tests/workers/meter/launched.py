"""A training script for any launcher, without Meshboard. With an argument, it starts its own ranks."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

STEPS = 8


def train(rank: int, port: int = 0) -> None:
    if port:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    network: nn.Module = nn.Linear(16, 16)
    model = nn.parallel.DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    if os.fork() == 0:  # a forked process does not count as a rank
        os._exit(0)
    os.wait()
    print(f"weight {network.weight.sum().item():.6f}", flush=True)  # type: ignore[union-attr, operator]
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mp.start_processes(train, (int(sys.argv[2]),), nprocs=2, start_method=sys.argv[1])  # type: ignore[no-untyped-call]
    else:
        train(0)
