"""One rank on a host of its own: what its meter counted and what its kernel sent on each connection, work by work."""

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
from tests.witness.connections import Served, sent, watched_groups
from workers.meter import Recorder, register_metered_backend

CALLS = 4
ELEMENT_BYTES = 4


class Work(NamedTuple):
    """Something this rank does CALLS times. What the meter does not keep, but gloo's messages depend on:

    `root` is a global rank, or the other end of a send; `doubles` names the group whose elements are of 8 bytes.
    """

    name: str
    hosts: int
    call_bytes: int
    root: int | None
    doubles: str | None
    call: Callable[[], object]


def primitives(members: Sequence[int], group: Any, size: int, rank: int) -> Iterator[Work]:
    """Each collective on the group with about `size` bytes; its second rank is the root."""
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
        "send": (other, partial(between, whole, here % 2 == 0, other, group)),
    }
    for name, (far, call) in calls.items():
        yield Work(name, count, whole.nbytes, far, None, call if rank in members else nothing)


def nothing() -> None:
    """What a rank outside the group does."""


def between(x: torch.Tensor, sends: bool, other: int | None, group: Any) -> None:
    """From the first to the second of a pair; the last of an odd number has none."""
    if other is not None:
        dist.send(x, other, group=group) if sends else dist.recv(x, other, group=group)


def works(asked: dict[str, Any], recorder: Recorder, data_root: Path) -> Iterator[Work]:
    if "spec" in asked:
        trainer: Any = make_trainer(parse_spec(asked["spec"]), data_root, recorder)
        steps = iter(range(CALLS + 1))
        world = dist.distributed_c10d._get_default_group()  # it carries loss and norm
        yield Work(asked["name"], world.size(), 0, None, world.group_name, lambda: trainer.train_step(next(steps)))
        return
    for members in asked["groups"]:
        group = dist.new_group(members)
        for size in asked["sizes"]:
            yield from primitives(members, group, size, recorder.rank)
        meeting = partial(dist.barrier, group=group)
        yield Work("barrier", len(members), 0, None, None, meeting if recorder.rank in members else nothing)


class Rank:
    """This rank, and the store it meets the others in: nothing else of theirs is on the wire meanwhile."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.port = int(os.environ["MASTER_PORT"])
        # Rank 0's connections to its own store never leave the host.
        master = os.environ["MASTER_ADDR"]
        timeout = timedelta(seconds=60)
        self.store = dist.TCPStore(master, self.port, self.world, self.rank == 0, timeout=timeout)
        self.meetings = 0

    def meet(self) -> None:
        """A barrier over the store alone."""
        key, self.meetings = f"meeting/{self.meetings}", self.meetings + 1
        if self.store.add(key, 1) == self.world:
            self.store.set(f"{key}/all", "yes")
        self.store.wait([f"{key}/all"])

    def leave(self) -> None:
        """Rank 0 goes last: it keeps the store."""
        if self.rank:
            self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < self.world - 1:
            time.sleep(0.01)

    def run(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        """One process group's life: every work on it."""
        recorder = Recorder(self.rank)
        store = dist.PrefixStore(asked["name"], self.store)
        with watched_groups(self.port) as served:
            backend = register_metered_backend(recorder, "cpu")
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
            said = [self.witness(work, recorder, served) for work in works(asked, recorder, self.out)]
        dist.destroy_process_group()
        return said

    def witness(self, work: Work, recorder: Recorder, served: dict[str, Served]) -> dict[str, Any]:
        work.call()  # buffers are found
        completed(recorder)
        self.meet()
        expected = [connection for group in served.values() for connection in group.connections]
        before = sent(self.port, expected)
        self.meet()
        for _ in range(CALLS):
            work.call()
        self.meet()
        after = sent(self.port, expected)
        self.meet()  # nobody goes on before all have looked
        wire = [
            (name, group.members, connection.peer, after[connection] - before[connection])
            for name, group in served.items()
            for connection in group.connections
        ]
        what = {key: value for key, value in work._asdict().items() if key != "call"}
        return {**what, "metered": completed(recorder), "wire": wire}


def completed(recorder: Recorder) -> list[tuple[str, str, int]]:
    """Op, group and payload bytes of every collective since the last time, once all are complete."""
    while any(cell["completed"] < cell["count"] for cell in recorder.get_cells()):
        time.sleep(0.001)
    records, dropped = recorder.drain()
    assert dropped == 0
    return [(record.op, record.group, record.payload_bytes) for record in records]


def main() -> None:
    torch.set_num_threads(1)
    here = Rank(Path(sys.argv[1]))
    said = [item for asked in json.loads(sys.argv[2]) for item in here.run(asked)]
    (here.out / f"rank-{here.rank}.json").write_text(json.dumps(said))
    here.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
