"""Compare calls, bytes, and durations of the meter with those of torch.profiler for equal collectives.

With NCCL, `record_param_comms` events have calls and elements, and kernels have times. With gloo, `gloo:` events have
all of them. Collectives that gloo implements with another one are omitted there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.rank import (
    build_empty_result,
    build_parser,
    init_metered_group,
    set_up_device,
    synchronize,
    write_result,
)
from benchmarks.gpu.results import PartOutput
from workers.meter import Recorder
from workers.meter.rank_exit import run_and_exit

CALLS = 5
SIZES = {"cpu": (2**16,), "cuda": (2**16, 2**26)}  # bytes of the full buffer
ELEMENT_BYTES = {"float": 4}  # by the profiler's name of the type, in lower case
SAME_OP_ON_GLOO = ("all_reduce", "all_gather")
# Events that the profiler records under the same name as collectives.
NOT_COLLECTIVES = ("wait", "init", "barrier")


class OpTotals(NamedTuple):
    """Calls, bytes, and seconds of CALLS equal collectives."""

    calls: int
    payload_bytes: int
    seconds: float


def build_collectives(num_bytes: int, device: torch.device) -> dict[str, Callable[[bool], dist.Work | None]]:
    """Return collectives by the name that the meter uses. Their argument says whether they are asynchronous."""
    world = dist.get_world_size()
    share = num_bytes // 4 // world
    full, part, other = (torch.ones(n, device=device) for n in (share * world, share, share * world))
    return {
        "all_reduce": lambda later: dist.all_reduce(full, async_op=later),
        "all_gather": lambda later: dist.all_gather_into_tensor(full, part, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter_tensor(part, full, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(other, full, async_op=later),
        "broadcast": lambda later: dist.broadcast(full, 0, async_op=later),
    }


def profile_call(run: Callable[[], object], device: torch.device) -> list[Mapping[str, Any]]:
    """Return the trace events of a call, including its work on the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as trace:
        run()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def read_nccl_totals(events: list[Mapping[str, Any]]) -> OpTotals:
    """Return calls and bytes passed to NCCL, and the time of its kernels. A single rank may have no kernel."""
    on_host = [event for event in events if not str(event.get("cat", "")).startswith("gpu_")]
    handed = [event["args"] for event in on_host if event["name"] == "record_param_comms"]
    handed = [a for a in handed if str(a.get("Collective name", "")) not in ("", *NOT_COLLECTIVES)]
    kernels = [event for event in events if event.get("cat") == "kernel" and "nccl" in event["name"].lower()]
    payload = sum(
        max(int(a.get("In msg nelems", 0)), int(a.get("Out msg nelems", 0))) * ELEMENT_BYTES[str(a["dtype"]).lower()]
        for a in handed
    )
    return OpTotals(len(handed), payload, sum(kernel["dur"] for kernel in kernels) / 1e6)


def read_gloo_totals(events: list[Mapping[str, Any]]) -> OpTotals:
    """Return the totals of gloo's events. An all-gather counts the input of a rank."""
    own = [event for event in events if event["name"].startswith("gloo:")]
    payload = 0
    for event in own:
        elements = event["args"]["Input Dims"][0][0]
        gathered = dist.get_world_size() if "gather" in event["name"] else 1
        payload += elements * gathered * ELEMENT_BYTES[event["args"]["Input type"][0]]
    return OpTotals(len(own), payload, sum(event["dur"] for event in own) / 1e6)


def drain_meter(recorder: Recorder, op: str) -> OpTotals:
    """Return what the meter has recorded since the last call."""
    recorder.get_cells()  # asks the device what has ended
    records = [record for record in recorder.drain()[0] if record.op == op]
    return OpTotals(len(records), sum(r.payload_bytes for r in records), sum(r.duration_s for r in records))


def compare_collectives(recorder: Recorder, device: torch.device) -> PartOutput:
    """Compare all collectives in all sizes, synchronous and asynchronous. All ranks call this function."""
    found, world = build_empty_result(), dist.get_world_size()
    if world == 1:
        found["notes"].append("One GPU has a single rank, so NCCL sends little or nothing")
    for op, size, later, call in _cases(device):
        call(later)  # the first connects the ranks
        synchronize(device)
        dist.barrier()
        synchronize(device)
        drain_meter(recorder, op)

        def calls(call: Callable[[bool], dist.Work | None] = call, later: bool = later) -> None:
            for _ in range(CALLS):
                work = call(later)
                if work is not None:
                    work.wait()

        events = profile_call(calls, device)
        ours = drain_meter(recorder, op)
        theirs = read_nccl_totals(events) if device.type == "cuda" else read_gloo_totals(events)
        words = f"{op}, {size:,} B, {'async' if later else 'sync'}"
        pairs = {
            "calls": (ours.calls, theirs.calls),
            "bytes": (ours.payload_bytes, theirs.payload_bytes),
            "us each": (ours.seconds / CALLS * 1e6, theirs.seconds / CALLS * 1e6),
        }
        for unit, (mine, other) in pairs.items():
            found["measured"][f"{words}: {unit}"], found["beside"][f"{words}: {unit}"] = mine, other
            if unit != "us each" and mine != other:
                found["wrong"].append(f"{words}: the meter counts {mine:,.0f} {unit}, the profiler {other:,.0f}")
    return found


def _cases(device: torch.device) -> Iterator[tuple[str, int, bool, Callable[[bool], dist.Work | None]]]:
    for size in SIZES[device.type]:
        for op, call in build_collectives(size, device).items():
            if device.type == "cpu" and op not in SAME_OP_ON_GLOO:
                continue
            for later in (False, True):
                yield op, size, later, call


def main() -> int:
    options = build_parser(__doc__).parse_args()
    device = set_up_device(options)
    recorder = init_metered_group(device)
    found = compare_collectives(recorder, device)
    if recorder.rank == 0:
        write_result(options.out, found)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
