"""DDP script of a user that measures its own steps."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
data = TensorDataset(torch.randn(400, 64))
times, last_s = [], 0.0
for (batch,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    model(batch).sum().backward()
    time.sleep(0.02 * (1 + dist.get_rank()))
    optimizer.step()
    now_s = time.perf_counter()
    times.append(now_s - last_s)
    last_s = now_s
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(times[1:], file)
dist.destroy_process_group()
