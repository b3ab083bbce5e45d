"""DDP script of a user, without Meshboard code."""

import sys

import torch
import torch.distributed as dist
from helper import WIDTH  # type: ignore[import-not-found]  # a module next to the script
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
assert dist.get_backend() == "gloo"
model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    model(torch.randn(4, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"argv {sys.argv[1:]} {__name__}\n")
dist.destroy_process_group()
