"""Run a script with process groups that are bound to a GPU, split, and on gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    part = dist.split_group(split_ranks=[[0, 1, 2], [3]], group_desc="part")
    for floats, group in ((1, mesh.get_group("dp")), (2, mesh.get_group("tp")), (3, part)):
        dist.all_reduce(torch.zeros(floats, device="cuda"), group=group)
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
