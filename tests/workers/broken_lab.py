"""Run the lab with an all-reduce that corrupts one element on rank 1."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from workers.lab.__main__ import main as main

whole = dist.all_reduce


def spoiled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    work = whole(tensor, *args, **kwargs)
    if os.environ["RANK"] == "1":
        tensor[-1] += 1
    return work


dist.all_reduce = spoiled
