"""The device that a rank computes on, and what its maker calls it."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist


def own_device(kind: str) -> torch.device:
    """This rank's of its host: the processor, or the GPU whose number torchrun gave it, made the current one."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Its maker's name of it; of a processor that has none, its architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def meet(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """A barrier. NCCL's runs on a GPU, which torch would otherwise guess from the rank: wrong where hosts differ."""
    dist.barrier(group, device_ids=None if device.index is None else [device.index])
