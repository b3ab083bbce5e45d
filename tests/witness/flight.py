"""Report the calls of torch's flight recorder and of the meter on one rank."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

from planner.facts.parse_spec import parse_spec
from tests.parity.rank import make_trainer
from workers.meter import Recorder, register_metered_backend

ELEMENT_BYTES = {"Float": 4, "Double": 8, "Long": 8}
Call = tuple[str, str, int]  # op, group name, payload bytes


def primitives() -> None:
    x, halves, rank = torch.ones(1000), torch.ones(2000), dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.all_reduce(x)
    if rank < 2:
        dist.all_gather_single(halves, x, group=pair)
        dist.reduce_scatter_single(torch.empty(500), x, group=pair)
        dist.broadcast(x, 0, group=pair)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.all_to_all_single(torch.empty(1000), x)
    work = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    for w in work:
        assert w is not None
        w.wait()
    dist.barrier()


def recorded() -> list[Call]:
    """Return gloo's entries in order. It has none for send and receive, and a reduce-scatter is an all-reduce."""
    calls = []
    for entry in pickle.loads(_dump_fr_trace(True, False, False)).get("entries", []):
        op = entry["profiling_name"].removeprefix("gloo:")
        sizes, types = (
            (entry["output_sizes"], entry["output_dtypes"])
            if op == "all_gather"
            else (entry["input_sizes"], entry["input_dtypes"])
        )
        payload = sum(math.prod(size) * ELEMENT_BYTES[kind] for size, kind in zip(sizes, types, strict=True))
        calls.append((op, entry["process_group"][0], payload))
    return calls


def metered(recorder: Recorder) -> list[Call]:
    records, dropped = recorder.drain()
    assert dropped == 0
    calls = []
    for record in sorted(records, key=lambda r: r.start):
        if record.op not in ("send", "recv"):
            op = "all_reduce" if record.op == "reduce_scatter" else record.op
            calls.append((str(op), record.group, record.payload_bytes))
    return calls


def fly(spec: Any, data_root: Path, store: dist.Store) -> dict[str, list[Call]]:
    """Create a process group, run the spec on it, and return the calls of both recorders."""
    before = len(recorded())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorder = Recorder(rank)
    dist.init_process_group(register_metered_backend(recorder, "cpu"), store=store, rank=rank, world_size=world)
    if spec is None:
        primitives()
    else:
        trainer: Any = make_trainer(parse_spec(spec), data_root, recorder)
        for step in range(2):
            trainer.train_step(step)
    output = {"recorded": recorded()[before:], "metered": metered(recorder)}
    dist.barrier()
    dist.destroy_process_group()
    return output


def main() -> None:
    out, flown = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), int(os.environ["WORLD_SIZE"]))
    output = {name: fly(spec, out, dist.PrefixStore(name, store)) for name, spec in flown.items()}
    (out / f"flight-{os.environ['RANK']}.json").write_text(json.dumps(output))
