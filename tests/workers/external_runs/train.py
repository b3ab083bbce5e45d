"""A training script without Meshboard. It runs all-reduces until a file exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

NUMBERS = 1000  # of fp32 in each all-reduce


def main() -> int:
    enough, code = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.zeros(NUMBERS))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    last = torch.zeros(1)
    steps = 0
    while not last.item():
        weight.grad = torch.full((NUMBERS,), float(rank))
        dist.all_reduce(weight.grad)
        optimizer.step()
        steps += 1
        print(f"rank {rank} step {steps}", flush=True)
        last.fill_(float(enough.exists()))
        dist.broadcast(last, 0)
        time.sleep(0.02)
    print(f"step {steps}: loss={torch.tensor(rank + 0.5)}", flush=True)
    Path(f"{enough}.{rank}").write_text(str(steps))
    if code and rank == 1:
        raise ValueError("the loss is wrong")
    if code:
        dist.all_reduce(last)  # no server answers at this address
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
