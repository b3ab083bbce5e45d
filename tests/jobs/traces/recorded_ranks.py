"""Run two gloo ranks under torch's flight recorder and profiler, whose files the tests read."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], group_desc="mesh_tp")
    values = torch.ones(1000)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(3):
            (torch.randn(200, 200) @ torch.randn(200, 200)).sum()
            dist.all_reduce(values)
            dist.all_reduce(values, group=group)
            dist.all_gather([torch.empty(10) for _ in range(2)], torch.ones(10))
    watched.export_chrome_trace(str(folder / f"kineto_{rank}.json"))
    recorder = torch._C._distributed_c10d
    (folder / f"fr_rank_{rank}").write_bytes(recorder._dump_fr_trace())  # type: ignore[attr-defined]
    (folder / f"fr_rank_{rank}.json").write_bytes(recorder._dump_fr_trace_json())  # type: ignore[attr-defined]
    (folder / f"told_{rank}").write_text(json.dumps({"all_reduce": 6, "all_gather": 3}))
    dist.barrier()
    os._exit(0)  # all files are written, and threads of the profiler and gloo may end slowly


if __name__ == "__main__":
    main(Path(sys.argv[1]))
