"""A small DDP training on CPUs. Start it with torchrun."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _step in range(20):
    inputs, labels = torch.randn(32, 256), torch.randint(10, (32,))
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
