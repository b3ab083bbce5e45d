"""Build Kineto traces event by event, as torch.profiler writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs.runs.traces.imports.reader import ImportResult, read_traces
from jobs.runs.traces.imports.trace_files import TraceFile

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def build_event(
    category: str, name: str, began: float, duration: float, *, lane: int = 7, **args: Any
) -> dict[str, Any]:
    """Return a complete event. `lane`: its thread or stream."""
    on_device = category in ("kernel", "gpu_memcpy", "gpu_user_annotation")
    times = {"ts": began, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, "pid": 0 if on_device else 9, "tid": lane, **times, "args": args}


def build_step(number: int, began: float, duration: float) -> dict[str, Any]:
    return build_event("user_annotation", f"ProfilerStep#{number}", began, duration, lane=9)


def build_launch(correlation: int, began: float) -> dict[str, Any]:
    return build_event("cuda_runtime", "cudaLaunchKernel", began, 2, lane=9, correlation=correlation)


def collective_args(group: str = "0", description: str = "default_pg", **args: Any) -> dict[str, Any]:
    """Return the arguments that torch records for a collective of 4,000 bytes in two ranks."""
    return {
        "Collective name": "allreduce",
        "Process Group Name": group,
        "Process Group Description": description,
        "Process Group Ranks": "[0, 1]",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "dtype": "Float",
        **args,
    }


def write_trace(folder: Path, rank: int, events: list[Any], **changes: Any) -> Path:
    """Write the trace of a rank of a run with two ranks and two process groups."""
    groups = [{"pg_name": name, "pg_desc": name, "ranks": [0, 1]} for name in ("0", "1")]
    info = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups}
    path = folder / f"trace_rank{rank}.json"
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, **changes}))
    return path


def read_files(*paths: Path) -> ImportResult:
    return read_traces([TraceFile(path.name, path) for path in paths])
