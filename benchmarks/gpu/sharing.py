"""Ranks that are more than the GPUs of a machine."""

from __future__ import annotations

import os

import torch

# Of a rank that shares its GPU. NCCL refuses two ranks of one host on one GPU: to it each is alone on a host of its
# own, so that all it sends goes through the sockets of the loopback interface.
SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def own_gpu(rank: int, ranks: int) -> torch.device:
    """Made the current one. Called before NCCL reads its environment."""
    count = torch.cuda.device_count()
    if ranks > count:
        as_own_host(rank)
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def as_own_host(rank: int) -> None:
    """Let NCCL take this rank for one alone on its host, whatever it shares with others."""
    os.environ.update(SOCKETS, NCCL_HOSTID=f"rank-{rank}")
