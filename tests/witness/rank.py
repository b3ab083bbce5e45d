"""Report the bytes of each connection by the meter and by the kernel, for one rank on its own host."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.facts.parse_spec import parse_spec
from tests.parity.rank import make_trainer
from tests.witness.connections import GroupConnections, read_sent_bytes, watch_groups
from workers.meter import Recorder, register_metered_backend

CALLS = 4
ELEMENT_BYTES = 4


class Work(NamedTuple):
    """Work that this rank repeats CALLS times, with facts that gloo's messages depend on but the meter does not keep.

    `root` is a global rank, or the peer of a send. `doubles` names the group with elements of 8 bytes.
    """

    name: str
    hosts: int
    call_bytes: int
    root: int | None
    doubles: str | None
    call: Callable[[], object]


def build_primitives(members: Sequence[int], group: Any, size: int, rank: int) -> Iterator[Work]:
    """Return each collective on the group with about `size` bytes. The second rank is the root."""
    count, root = len(members), members[1]
    part = torch.ones(size // ELEMENT_BYTES // count)
    whole = torch.ones(part.numel() * count)
    parts, out = list(whole.chunk(count)), torch.empty_like(whole)
    here = members.index(rank) if rank in members else 0
    other = members[here ^ 1] if here ^ 1 < count else None
    at_root = parts if rank == root else None
    calls: dict[str, tuple[int | None, Callable[[], object]]] = {
        "all_reduce": (None, partial(dist.all_reduce, whole, group=group)),
        "all_gather": (None, partial(dist.all_gather_single, out, part, group=group)),
        "reduce_scatter": (None, partial(dist.reduce_scatter_single, part, whole, group=group)),
        "all_to_all": (None, partial(dist.all_to_all_single, out, whole, group=group)),
        "broadcast": (root, partial(dist.broadcast, whole, root, group=group)),
        "reduce": (root, partial(dist.reduce, whole, root, group=group)),
        "gather": (root, partial(dist.gather, part, at_root, root, group=group)),
        "scatter": (root, partial(dist.scatter, part, at_root, root, group=group)),
        "send": (other, partial(build_exchange, whole, here % 2 == 0, other, group)),
    }
    for name, (far, call) in calls.items():
        yield Work(name, count, whole.nbytes, far, None, call if rank in members else do_nothing)


def do_nothing() -> None:
    """Replace the work on ranks outside the group."""


def build_exchange(x: torch.Tensor, sends: bool, other: int | None, group: Any) -> None:
    """Return sends from the first to the second rank of each pair. An odd last rank has none."""
    if other is not None:
        dist.send(x, other, group=group) if sends else dist.recv(x, other, group=group)


def list_works(request: dict[str, Any], recorder: Recorder, data_root: Path) -> Iterator[Work]:
    if "spec" in request:
        trainer: Any = make_trainer(parse_spec(request["spec"]), data_root, recorder)
        steps = iter(range(CALLS + 1))
        world = dist.distributed_c10d._get_default_group()  # it carries loss and norm
        yield Work(request["name"], world.size(), 0, None, world.group_name, lambda: trainer.train_step(next(steps)))
        return
    for members in request["groups"]:
        group = dist.new_group(members)
        for size in request["sizes"]:
            yield from build_primitives(members, group, size, recorder.rank)
        meeting = partial(dist.barrier, group=group)
        yield Work("barrier", len(members), 0, None, None, meeting if recorder.rank in members else do_nothing)


class WitnessRank:
    """Run work on one rank. A store synchronizes the ranks, because a barrier would add traffic."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.port = int(os.environ["MASTER_PORT"])
        # Connections of rank 0 to its own store stay on the host.
        master = os.environ["MASTER_ADDR"]
        timeout = timedelta(seconds=60)
        self.store = dist.TCPStore(master, self.port, self.world, self.rank == 0, timeout=timeout)
        self.meetings = 0

    def synchronize(self) -> None:
        """Wait for all ranks on the store."""
        key, self.meetings = f"meeting/{self.meetings}", self.meetings + 1
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key}/all", "yes")
        self.store.wait([f"{key}/all"])

    def leave(self) -> None:
        """Leave as the last rank on rank 0, which has the store."""
        if self.rank:
            self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < self.world - 1:
            time.sleep(0.01)

    def run(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Create a process group, run each work on it, and destroy it."""
        recorder = Recorder(self.rank)
        store = dist.PrefixStore(request["name"], self.store)
        with watch_groups(self.port) as served:
            backend = register_metered_backend(recorder, "cpu")
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            output = [self.witness(work, recorder, served) for work in list_works(request, recorder, self.out)]
        dist.destroy_process_group()
        return output

    def witness(self, work: Work, recorder: Recorder, served: dict[str, GroupConnections]) -> dict[str, Any]:
        work.call()  # buffers are allocated
        drain_completed(recorder)
        self.synchronize()
        expected = [connection for group in served.values() for connection in group.connections]
        before = read_sent_bytes(self.port, expected)
        self.synchronize()
        for _ in range(CALLS):
            work.call()
        self.synchronize()
        after = read_sent_bytes(self.port, expected)
        self.synchronize()  # no rank continues before all ranks have read the counters
        wire = [
            (name, group.members, connection.peer, after[connection] - before[connection])
            for name, group in served.items()
            for connection in group.connections
        ]
        what = {key: value for key, value in work._asdict().items() if key != "call"}
        return {**what, "metered": drain_completed(recorder), "wire": wire}


def drain_completed(recorder: Recorder) -> list[tuple[str, str, int]]:
    """Return operation, group, and payload bytes of collectives since the last call, when all have completed."""
    while any(cell["completed"] < cell["count"] for cell in recorder.get_cells()):
        time.sleep(0.001)
    records, dropped = recorder.drain()
    assert dropped == 0
    return [(record.op, record.group, record.payload_bytes) for record in records]


def main() -> None:
    torch.set_num_threads(1)
    here = WitnessRank(Path(sys.argv[1]))
    output = [item for request in json.loads(sys.argv[2]) for item in here.run(request)]
    (here.out / f"rank-{here.rank}.json").write_text(json.dumps(output))
    here.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
