"""GAN-like script of a user: two optimizers, a sparse gradient, a mesh axis as large as the world, a named group."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
pair = dist.new_group([0, 1], group_desc="my pair")
dist.all_reduce(torch.ones(8), group=pair)
dist.all_reduce(torch.ones(2, dtype=torch.complex64), group=mesh.get_group("tp"))
dist.all_reduce(torch.empty(0), group=mesh.get_group("tp"))

words = DistributedDataParallel(torch.nn.Embedding(10, 4, sparse=True), process_group=pair)
other = torch.nn.Linear(4, 4)
optimizers = [torch.optim.SparseAdam(words.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)]
for _ in range(3):
    other(words(torch.tensor([1, 2, 3]))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
sys.stdout.write(f"file {__file__}\n")
dist.destroy_process_group()
