"""Run one gloo rank whose calls contradict those of its peer, and write its flight recorder dump."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=2)
ABORTING = ("size", "dtype")  # gloo ends the process that receives more bytes than it expects, so it dumps before


def call_others(kind: str) -> None:
    """Make the calls of rank 1 after the first call."""
    match kind:
        case "operation":
            dist.broadcast(torch.ones(4), 0)
        case "size":
            dist.all_reduce(torch.ones(8), async_op=True)
        case "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float64), async_op=True)
        case "order":
            dist.broadcast(torch.ones(4), 0)
            dist.all_reduce(torch.ones(4))


def call_usual(kind: str) -> None:
    """Make the calls of rank 0 after the first call."""
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if kind not in ABORTING:
        assert work is not None
        work.wait()
        dist.broadcast(torch.ones(4), 0)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    folder, kind, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    dist.all_reduce(torch.ones(4))
    try:
        if rank == 0:
            call_usual(kind)
        else:
            if kind in ABORTING:
                wait_for_file(folder / "rank_0")
            call_others(kind)
    except RuntimeError as error:
        print(error)
    part = folder / f"part_{rank}"
    part.write_bytes(_dump_fr_trace(True, True, False))
    part.rename(folder / f"rank_{rank}")
    wait_for_file(folder / f"rank_{1 - rank}")  # an early exit would end the call of the peer
    os._exit(0)


if __name__ == "__main__":
    main()
