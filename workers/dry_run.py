"""`python -m workers.dry_run --spec FILE --ranks 0,17`: run a training step of some ranks without peers or arithmetic.

The trainer runs on fake tensors in one process. Its process groups count each collective and send no data.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from contracts.telemetry.items import Cell, Op
from contracts.telemetry.results import DryRunItem, MemoryParts, VerdictItem, VerdictRow
from planner.cost.memory import get_gradient_bytes, get_memory
from planner.facts.layout import get_coordinates
from planner.facts.parse_spec import parse_spec
from planner.facts.resources import Device
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_unsupported_fields
from planner.facts.validation import SpecError
from workers.meter import Recorder
from workers.meter.exporter import add_telemetry_options, open_exporter
from workers.meter.process_group import CollectiveBytes, MeteredProcessGroup
from workers.meter.rank_exit import fail, run_and_exit
from workers.torch_private.compiler import (
    ATTENTION,
    ATTENTION_BACKWARD,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
)
from workers.torch_private.fsdp import watch_storage
from workers.torch_private.groups import fake_store, make_fake_group
from workers.trainer.dataset import TokenDataset, Tokens
from workers.trainer.errors import UserError
from workers.trainer.memory import MemoryProbe, get_storage_bytes
from workers.trainer.parallel.mesh import build_mesh
from workers.trainer.parallel.parallelize import assemble_shard, build_chunks, get_local
from workers.trainer.spec_file import read_spec_file
from workers.trainer.traffic_check import compare_step_traffic
from workers.trainer.trainer import Trainer

STAGED_OPS = ("all_gather", "reduce_scatter")  # gloo copies the full buffer (torch 2.13)
GET_DEVICE = torch.ops.prim.device.default
aten = torch.ops.aten
IN_PLACE_MATMULS = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}
# Objects. A low threshold frees reference cycles at once, so that they do not count in the peak.
GC_THRESHOLD = 50


class CompletedWork(dist.Work):
    """Work that is complete from the start. Like a real work, it keeps its tensors alive until the wait."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return True


class DryProcessGroup(MeteredProcessGroup):
    """Process group that records each collective, sends no data, and leaves outputs unchanged.

    With `uses_staging`, it allocates the copy that gloo makes of the full buffer.
    """

    uses_staging = False

    def _run(
        self, method: str, op: Op, sizes: CollectiveBytes, args: Sequence[Any], kwargs: dict[str, Any], poller: object
    ) -> Any:
        self._issue(op, sizes)()
        staged = [torch.empty(sizes.payload_bytes, dtype=torch.uint8)] if self.uses_staging and op in STAGED_OPS else []
        return CompletedWork((*args, *staged))


def init_dry_process_group(recorder: Recorder, rank: int, world_size: int, device: Device) -> None:
    """Make this process `rank` of a world of `world_size` ranks that do not exist.

    Args:
        device: Device of each rank, which decides about the staging copies of gloo.
    """
    name = f"dry_{len(dist.Backend.backend_list)}"

    def create(options: Any, backend_options: Any) -> MeteredProcessGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        group = DryProcessGroup(make_fake_group(options), options.group_id, recorder, [torch.device("cpu")], ranks)
        group.uses_staging = device == "cpu"
        return group

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(name, store=fake_store(), rank=rank, world_size=world_size)


class MemoryAndFlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Track the peak of live storages in bytes, and count the FLOPs of matmuls, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._peak_bytes = 0
        self._alive: dict[int, int] = {}
        self._alive_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GET_DEVICE:  # called twice per operation, and slow for a fake tensor
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        out = func(*args, **(kwargs or {}))
        self.flops += _count_flops(func, args, kwargs or {}, out)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # The local tensor of a DTensor is also an output of an operation.
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._track(tensor)
        return out

    def read(self) -> int:
        """Return the peak of live bytes since `restart`."""
        return self._peak_bytes

    def restart(self) -> None:
        """Reset the peak to the current live bytes."""
        self._peak_bytes = self._alive_bytes

    def record_resize(self, tensor: torch.Tensor) -> None:
        """Update a storage that was resized in place, which dispatches no operation."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._alive:
            self._set_bytes(storage_key(storage), storage.nbytes())

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._alive:
            return
        self._set_bytes(storage_key(storage), storage.nbytes())
        weakref.finalize(storage, self._release, storage_key(storage))

    def _set_bytes(self, key: int, num_bytes: int) -> None:
        self._alive_bytes += num_bytes - self._alive.get(key, 0)
        self._alive[key] = num_bytes
        self._peak_bytes = max(self._peak_bytes, self._alive_bytes)

    def _release(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key)


def _count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one operation, from torch's table with in-place matmuls and CPU attention in addition."""
    count = flop_registry.get(IN_PLACE_MATMULS.get(func.overloadpacket, func.overloadpacket))
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if func is ATTENTION:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))  # type: ignore[no-untyped-call]
    if func is ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))  # type: ignore[no-untyped-call]
    return 0


class DryStep(NamedTuple):
    """Traffic, memory and FLOPs of one rank in one optimizer step.

    `peak_bytes` is the peak of live tensors without Adam's moments, whose bytes are `optimizer_bytes`. `memory` divides
    both by purpose.
    """

    rank: int
    cells: list[Cell]
    received_rows: int  # tokens of its experts
    parameters: int
    peak_bytes: int
    optimizer_bytes: int
    memory: MemoryParts
    flops: int
    seconds: float


class ZeroCorpus:
    """TokenDataset whose tokens are all zero."""

    def train_batch(self, seed: int, step: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        return np.zeros((rows.stop - rows.start, seq_len + 1), dtype=np.int64)


def run_dry_step(spec: JobSpec, rank: int) -> DryStep:
    """Run a step of `rank` after the first, without allocated weights and communication.

    The step runs the whole code of the trainer, except the initialization of weights and the router's choice, which is
    even. The CPU kernels save the same tensors for backward as the GPU kernels. A process runs one dry step at a time.
    """
    started = time.perf_counter()
    threshold = gc.get_threshold()
    gc.collect()
    gc.set_threshold(GC_THRESHOLD)
    recorder, device = Recorder(rank), torch.device("cpu")
    init_dry_process_group(recorder, rank, spec.layout.world_size, spec.resources.device)
    try:
        mesh = build_mesh(spec, rank, recorder.label_group)
        built = build_chunks(spec, mesh, device, init=False, even_routing=True)
        counter = MemoryAndFlopCounter()
        with FakeTensorMode(allow_non_fake_inputs=True), counter, watch_storage(counter.record_resize):
            for decoder in built.chunks.values():
                decoder.to_empty(device=device)
            part = assemble_shard(spec, mesh, built)
            trainer = Trainer(spec, mesh, part, cast(TokenDataset, ZeroCorpus()), recorder, device)
            moments_bytes = _create_moments(trainer)
            trainer.memory_probe = probe = MemoryProbe(part, trainer.optimizer, counter, trainer.get_staged_tensors)
            recorder.set_phase("step")
            trainer.forward_backward(0)
            probe.record_gradients()
            trainer.reduce_statistics()
            trainer.clip_gradients(math.inf)
            trainer.update_weights(0)
            memory = probe.get_breakdown()
        cells = recorder.get_cells("step")
        rows = trainer.pop_received_rows()
    finally:
        gc.set_threshold(*threshold)
        dist.destroy_process_group()
    seconds = time.perf_counter() - started
    num_parameters = sum(get_local(p).numel() for p in part.get_masters())
    return DryStep(
        rank, cells, rows, num_parameters, counter.read() - moments_bytes, moments_bytes, memory, counter.flops, seconds
    )


def _create_moments(trainer: Trainer) -> int:
    """Let the optimizer create the moments of each weight, and return their bytes."""
    for master in trainer.model.get_masters():
        master.grad = torch.zeros_like(master)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    state = trainer.optimizer.state
    return get_storage_bytes(get_local(value) for tensors in state.values() for value in tensors.values() if value.ndim)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.dry_run", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="JSON file with the job spec")
    parser.add_argument("--ranks", help="comma-separated ranks; default dry_ranks of the spec")
    parser.add_argument("--json", action="store_true", help="print one JSON object per rank")
    add_telemetry_options(parser)
    options = parser.parse_args()
    try:
        spec = _read_spec(options.spec, options.ranks)
    except (UserError, SpecError) as error:
        return fail(str(error), 2)
    num_wrong = 0
    with open_exporter(Recorder(0), options) as send:
        for rank in spec.dry_ranks:
            item, rows = _compare(spec, run_dry_step(spec, rank))
            num_wrong += _count_wrong(rows)
            _print(spec, item, rows, as_json=options.json)
            send(VerdictItem(kind="verdict", rank=rank, time=time.time(), rows=rows))
            send(item)
    return fail(f"{num_wrong} of the collectives above differ from the prediction", 1) if num_wrong else 0


def _compare(spec: JobSpec, step: DryStep) -> tuple[DryRunItem, list[VerdictRow]]:
    parts = get_memory(spec, get_coordinates(step.rank, spec.layout).pp)
    item = DryRunItem(
        kind="dry_run",
        rank=step.rank,
        time=time.time(),
        parameters=step.parameters,
        peak_bytes=step.peak_bytes,
        optimizer_bytes=step.optimizer_bytes,
        predicted_bytes=sum(parts.values()),
        memory=step.memory,
        flops=step.flops,
        seconds=step.seconds,
    )
    return item, compare_step_traffic(spec, step.rank, step.cells, {"step": step.received_rows})


def _count_wrong(rows: list[VerdictRow]) -> int:
    return sum((r["predicted_bytes"], r["predicted_count"]) != (r["measured_bytes"], r["measured_count"]) for r in rows)


def _print(spec: JobSpec, item: DryRunItem, rows: list[VerdictRow], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**item, "collectives": rows}), flush=True)
        return
    where = " ".join(f"{axis} {index}" for axis, index in get_coordinates(item["rank"], spec.layout)._asdict().items())
    print(f"rank {item['rank']} of {spec.layout.world_size} ({where}), computed in {item['seconds']:.1f} s")
    print(f"  {'keeps':<30}{item['parameters']:>24,} parameters")
    print(f"  {'most at once, with moments':<30}{item['peak_bytes'] + item['optimizer_bytes']:>24,} B")
    print(f"  {'the planner estimates':<30}{item['predicted_bytes']:>24,} B")
    stage, counted = get_coordinates(item["rank"], spec.layout).pp, item["memory"]
    planned = get_memory(spec, stage)
    for label, found, expected in (
        ("of these weights", counted["parameters"], planned["parameters"]),
        ("moments, without fp32 weights", counted["optimizer"], planned["optimizer"]),
        ("complete gradients", counted["gradients"], get_gradient_bytes(spec, stage)),
    ):
        print(f"  {label:<30}{found:>24,} B  {expected:,} B planned")
    print(f"  {'products':<30}{item['flops']:>24,} FLOP")
    for row in rows:
        name = f"{row['axis']} {row['op']}, {row['measured_count']:,} calls"
        wanted = f"WRONG: {row['predicted_count']:,} calls, {row['predicted_bytes']:,} B predicted"
        print(f"  {name:<30}{row['measured_bytes']:>24,} B  {wanted if _count_wrong([row]) else 'as predicted'}")
    sys.stdout.flush()


def _read_spec(path: Path, ranks: str | None) -> JobSpec:
    content = read_spec_file(path)
    if isinstance(content, dict):
        content["kind"] = "dry_run"
        if ranks is not None:
            content["dry_ranks"] = [int(r) if r.strip().isdigit() else r for r in ranks.split(",")]
    spec = parse_spec(content)
    if problems := find_unsupported_fields(spec):
        raise SpecError(problems)
    return spec


if __name__ == "__main__":
    run_and_exit(main)
