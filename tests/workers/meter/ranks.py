"""Checks that run on four gloo ranks, and write results and counters as JSON to a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.processes import scale_timeout
from workers.meter import Recorder, register_metered_backend
from workers.meter.monitors import build_timeline

Counted = dict[str, list[Any]]
CHECKS: list[Callable[[Recorder, int, int], dict[str, Any]]] = []
SLOW_S = 0.6  # twice the longest delay on a busy machine


def check(function: Callable[[Recorder, int, int], dict[str, Any]]) -> Callable[[Recorder, int, int], dict[str, Any]]:
    CHECKS.append(function)
    return function


def totals(recorder: Recorder) -> dict[str, list[Any]]:
    return {
        f"{c['op']} {c['axis']} {c['group_size']}": [c["count"], c["completed"], c["payload_bytes"], c["busy_s"]]
        for c in recorder.get_cells("setup")
    }


@contextmanager
def counting(recorder: Recorder) -> Iterator[Counted]:
    """Yield a dict that receives {"op axis size": [count, completed, payload bytes, busy seconds]} of the block."""
    counted: Counted = {}
    before = totals(recorder)
    yield counted
    deadline = time.monotonic() + scale_timeout(10)
    while any(count != completed for count, completed, *_ in totals(recorder).values()):
        assert time.monotonic() < deadline, "a collective never completed"
        time.sleep(0.001)
    for key, after in totals(recorder).items():
        change = [b - a for a, b in zip(before.get(key, [0, 0, 0, 0]), after, strict=True)]
        if change[0]:
            counted[key] = change


def tensor(rank: int, size: int = 8) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + rank


def each_op(world: int, rank: int) -> dict[str, tuple[Callable[..., Any], Callable[[], bool]]]:
    """Return op -> (run, check the result). Every payload is 8 floats per rank."""
    mine, summed = tensor(rank), sum(tensor(r) for r in range(world))
    everything = torch.cat([tensor(r) for r in range(world)])
    reduced, copied, gathered = mine.clone(), mine.clone(), torch.empty(8 * world)
    rooted, shard, lists = mine.clone(), torch.empty(8), [torch.empty(8) for _ in range(world)]
    wide, list_shard = torch.stack([tensor(r) for r in range(world)]).flatten() + rank, torch.empty(8)
    exchanged, taken = torch.empty(8), torch.empty(8)
    to_gather = [torch.empty(8) for _ in range(world)] if rank == 0 else None
    to_scatter = [tensor(r) * 3 for r in range(world)] if rank == 0 else None
    share = world * tensor(rank) + sum(range(world))  # slice `rank` of the sum of all ranks' `wide`
    sent_to_me = torch.cat([tensor(r)[rank * 2 : rank * 2 + 2] for r in range(world)])
    exchange_lists = [torch.empty(2) for _ in range(world)]
    return {
        "all_reduce": (lambda **k: dist.all_reduce(reduced, **k), lambda: reduced.equal(summed)),
        "broadcast": (lambda **k: dist.broadcast(copied, 1, **k), lambda: copied.equal(tensor(1))),
        "reduce": (lambda **k: dist.reduce(rooted, 0, **k), lambda: rank != 0 or rooted.equal(summed)),
        "all_gather": (lambda **k: dist.all_gather_single(gathered, mine, **k), lambda: gathered.equal(everything)),
        "all_gather list": (
            lambda **k: dist.all_gather(lists, mine, **k),
            lambda: torch.cat(lists).equal(everything),
        ),
        "reduce_scatter": (lambda **k: dist.reduce_scatter_single(shard, wide, **k), lambda: shard.equal(share)),
        "reduce_scatter list": (
            lambda **k: dist.reduce_scatter(list_shard, list(wide.split(8)), **k),
            lambda: list_shard.equal(share),
        ),
        "all_to_all": (
            lambda **k: dist.all_to_all_single(exchanged, mine, **k),
            lambda: exchanged.equal(sent_to_me),
        ),
        "all_to_all list": (
            lambda **k: dist.all_to_all(exchange_lists, list(mine.split(2)), **k),
            lambda: torch.cat(exchange_lists).equal(sent_to_me),
        ),
        "gather": (
            lambda **k: dist.gather(mine, to_gather, 0, **k),
            lambda: to_gather is None or torch.cat(to_gather).equal(everything),
        ),
        "scatter": (
            lambda **k: dist.scatter(taken, to_scatter, 0, **k),
            lambda: taken.equal(tensor(rank) * 3),
        ),
        "barrier": (lambda **k: dist.barrier(**k), lambda: True),
    }


@check
def collectives(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for mode in ("sync", "async"):
        for op, (run, is_right) in each_op(world, rank).items():
            with counting(recorder) as counted:
                if mode == "sync":
                    run()
                else:
                    run(async_op=True).wait()
            messages[f"{mode} {op}"] = {"counted": counted, "right": is_right()}
    return messages


@check
def uneven(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Send r + 1 rows of 2 floats from rank r to each other rank, and keep 5 rows."""
    sent = [5 if other == rank else rank + 1 for other in range(world)]
    came = [5 if other == rank else other + 1 for other in range(world)]
    before = _exchanged(recorder)
    taken, options = torch.empty(sum(came), 2), torch.full((sum(sent), 2), float(rank))
    dist.all_to_all_single(taken, options, came, sent)
    counted = [b - a for a, b in zip(before, _exchanged(recorder), strict=True)]
    return {"counted": counted, "right": [int(part[0, 0]) for part in taken.split(came)] == list(range(world))}


def _exchanged(recorder: Recorder) -> tuple[int, int]:
    cells = [c for c in recorder.get_cells() if c["op"] == "all_to_all"]
    return sum(c["payload_bytes"] for c in cells), sum(c["algorithmic_bytes"] for c in cells)


@check
def coalesced(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    reduced = [tensor(rank), tensor(rank)]
    summed = sum(tensor(r) for r in range(world))
    with counting(recorder) as messages["all_reduce"], dist.distributed_c10d._coalescing_manager():
        for t in reduced:
            dist.all_reduce(t)
    messages["all_reduce right"] = all(t.equal(summed) for t in reduced)
    outputs = [torch.empty(8 * world), torch.empty(8 * world)]
    with counting(recorder) as messages["all_gather"], dist.distributed_c10d._coalescing_manager():
        for output in outputs:
            dist.all_gather_single(output, tensor(rank))
    everything = torch.cat([tensor(r) for r in range(world)])
    messages["all_gather right"] = all(output.equal(everything) for output in outputs)
    return messages


@check
def functional(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Call the C++ operators of DTensor and compiled code, which find the group by its name."""
    messages: dict[str, Any] = {}
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    summed = sum(tensor(r) for r in range(world))
    with counting(recorder) as messages["all_reduce"]:
        reduced = ops.wait_tensor(ops.all_reduce(tensor(rank), "sum", name))
    with counting(recorder) as messages["all_gather"]:
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(tensor(rank), world, name))
    with counting(recorder) as messages["reduce_scatter"]:
        shard = ops.wait_tensor(ops.reduce_scatter_tensor(tensor(rank), "sum", world, name))
    with counting(recorder) as messages["all_to_all"]:
        ops.wait_tensor(ops.all_to_all_single(tensor(rank), [2] * world, [2] * world, name))
    with counting(recorder) as messages["broadcast"]:
        ops.wait_tensor(ops.broadcast(tensor(rank), 0, name))
    messages["right"] = (
        reduced.equal(summed)
        and gathered.equal(torch.cat([tensor(r) for r in range(world)]))
        and shard.equal(summed[rank * 2 : rank * 2 + 2])
    )
    return messages


@check
def point_to_point(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    peer, received = rank ^ 1, torch.empty(8)
    with counting(recorder) as messages["isend irecv"]:
        works = [dist.isend(tensor(rank), peer), dist.irecv(received, peer)]
        for work in works:
            work.wait()
    messages["right"] = received.equal(tensor(peer))
    batched = torch.empty(8)
    with counting(recorder) as messages["batch"]:
        mine = tensor(rank)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, batched, peer)]):
            work.wait()
    messages["batch right"] = batched.equal(tensor(peer))
    anyone = torch.empty(8)
    with counting(recorder) as messages["blocking, from anyone"]:
        if rank % 2:
            dist.recv(anyone)
        else:
            dist.send(tensor(rank), peer)
    messages["anyone right"] = rank % 2 == 0 or bool(anyone.equal(tensor(int(anyone[0]))))
    return messages


@check
def objects(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    gathered: list[Any] = [None] * world
    with counting(recorder) as messages["counted"]:
        dist.all_gather_object(gathered, {"rank": rank})
    messages["right"] = gathered == [{"rank": r} for r in range(world)]
    return messages


@check
def axes(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Count collectives of a mesh, and of a plain group before and after its label."""
    messages: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    with counting(recorder) as messages["mesh"]:
        dist.all_reduce(tensor(rank), group=mesh.get_group("tp"))
        dist.all_reduce(tensor(rank), group=mesh.get_group("tp"))
        dist.all_reduce(tensor(rank), group=mesh.get_group("dp"))
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = half[rank // 2]
    with counting(recorder) as messages["unlabelled"]:
        dist.all_reduce(tensor(rank), group=mine)
    recorder.label_group(mine.group_name, "pp")
    with counting(recorder) as messages["labelled"]:
        dist.all_reduce(tensor(rank), group=mine)
    return messages


@check
def late_rank(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Run a collective for which rank 0 is late."""
    messages: dict[str, Any] = {}
    dist.barrier()
    with counting(recorder) as messages["counted"]:
        start = time.perf_counter()
        if rank == 0:
            time.sleep(SLOW_S)
        dist.all_reduce(tensor(rank))
        messages["wall_s"] = time.perf_counter() - start
    return messages


@check
def phases(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Change the phase while a collective is in flight."""
    peer, received = rank ^ 1, torch.empty(8)
    recorder.set_phase("step")
    work = dist.irecv(received, peer)
    recorder.set_phase("eval")
    dist.send(tensor(rank), peer)
    work.wait()
    cells = {f"{c['phase']} {c['op']}": [c["count"], c["completed"], c["payload_bytes"]] for c in recorder.get_cells()}
    recorder.set_phase("setup")
    return {key: cells.get(key) for key in ("step recv", "eval recv", "step send", "eval send")}


@check
def step(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    """Run a step with an all-reduce for which rank 0 is late, and one that overlaps compute."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    again = dist.new_group([2 * (rank // 2), 2 * (rank // 2) + 1], use_local_synchronization=True)
    recorder.label_group(again.group_name, "tp")
    recorder.enable_tracing()
    dist.barrier()
    recorder.set_phase("step")
    recorder.begin_step(1)
    with recorder.time_span("data"):
        time.sleep(0.02)
    if rank == 0:
        time.sleep(SLOW_S)
    dist.all_reduce(tensor(rank))
    work = dist.all_reduce(tensor(rank), group=mesh.get_group("dp"), async_op=True)
    with recorder.time_span("forward", 2, 3):
        time.sleep(0.05)
    work.wait()
    dist.all_reduce(tensor(rank), group=again)
    received = torch.empty(8)
    for _ in range(2):
        for work in (dist.isend(tensor(rank), rank ^ 1, again), dist.irecv(received, rank ^ 1, again)):
            work.wait()
    parts = recorder.end_step(1)
    recorder.close_trace()
    recorder.set_phase("setup")
    (log,) = recorder.take_traces()
    return {"parts": parts, "told": build_timeline(recorder, log)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def mean_gradients(world: int) -> list[torch.Tensor]:
    """Return the gradients of a single-process reference on the batches of all ranks."""
    whole = model()
    (sum(whole(batch(r)).pow(2).mean() for r in range(world)) / world).backward()
    return [parameter.grad for parameter in whole.parameters()]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@check
def ddp(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    replica = DistributedDataParallel(model())
    with counting(recorder) as messages["counted"]:
        replica(batch(rank)).pow(2).mean().backward()
    messages["bytes"] = num_bytes(replica)
    messages["right"] = all(map(close, [p.grad for p in replica.parameters()], mean_gradients(world)))
    return messages


@check
def zero3(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    sharded = model()
    messages["bytes"] = num_bytes(sharded)
    for layer in sharded:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(sharded, reshard_after_forward=True)
    with counting(recorder) as messages["counted"]:
        sharded(batch(rank)).pow(2).mean().backward()
    gradients = [p.grad.full_tensor() for p in sharded.parameters()]
    messages["right"] = all(map(close, gradients, mean_gradients(world)))
    return messages


@check
def tensor_parallel(recorder: Recorder, rank: int, world: int) -> dict[str, Any]:
    messages: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    split = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    whole = model()
    same = batch(0)
    with counting(recorder) as messages["counted"]:
        output = split(same)
        output.pow(2).mean().backward()
    whole(same).pow(2).mean().backward()
    messages["output_bytes"] = output.nbytes
    gradients = [p.grad.full_tensor() for p in split.parameters()]
    messages["right"] = close(output, whole(same)) and all(map(close, gradients, [p.grad for p in whole.parameters()]))
    return messages


def main() -> None:
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    recorder = Recorder(rank)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend)
    messages = {run.__name__: run(recorder, rank, world) for run in CHECKS}
    messages["records"] = [record._asdict() for record in recorder.drain()[0]]
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(messages))
