"""One rank on a host of its own: what its meter counted and what its kernel sent, op by op."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.parse import parse_spec
from tests.parity.rank import make_trainer
from workers.meter import Recorder, metered_backend
from workers.trainer.loop import Trainer

CALLS = 4
NUMEL = 12 * 2**15  # 1.5 MiB of fp32, in 2, 3 or 4 equal parts
STEPS = 2
SENT = re.compile(r"bytes_sent:(\d+)")
RETRANSMITTED = re.compile(r"bytes_retrans:(\d+)")
UNACKNOWLEDGED = re.compile(r"(?:unacked|notsent):(\d+)")


def sent_by_peer(store_port: int) -> Counter[str]:
    """Bytes this host's kernel has sent over TCP, by peer, once all is acknowledged; the store's connections apart."""
    while True:
        told = subprocess.run(["ss", "-tinOH", "state", "established"], capture_output=True, text=True, check=True)
        lines = [line for line in told.stdout.splitlines() if f":{store_port} " not in line]
        if not any(UNACKNOWLEDGED.search(line) for line in lines):
            break
        time.sleep(0.01)
    found: Counter[str] = Counter()
    for line in lines:
        peer = line.split()[3].rsplit(":", 1)[0]
        if sent := SENT.search(line):
            again = RETRANSMITTED.search(line)
            found[peer] += int(sent[1]) - (int(again[1]) if again else 0)
    return found


def collectives(rank: int, world: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each primitive on the default group."""
    x, parts = torch.ones(NUMEL), torch.ones(NUMEL).chunk(world)
    whole = torch.empty(NUMEL)
    yield "all_reduce", lambda: dist.all_reduce(x)
    yield "all_gather", lambda: dist.all_gather_single(whole, parts[rank].contiguous())
    yield "reduce_scatter", lambda: dist.reduce_scatter_single(torch.empty_like(parts[0]), x)
    yield "all_to_all", lambda: dist.all_to_all_single(whole, x)
    yield "broadcast", lambda: dist.broadcast(x, 0)
    yield "send", lambda: to_the_next(x, rank, world)


def to_the_next(x: torch.Tensor, rank: int, world: int) -> None:
    """From each even rank to the odd one after it."""
    if rank % 2:
        dist.recv(x, rank - 1)
    elif rank + 1 < world:
        dist.send(x, rank + 1)


def training(trainer: Trainer) -> Iterator[tuple[str, Callable[[], object]]]:
    steps = iter(range(CALLS + 1))
    yield "training", lambda: trainer.step(next(steps))


def main() -> None:
    out, content = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    recorder = Recorder(rank)
    # Rank 0's connections to its own store never leave the host.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(metered_backend(recorder, "cpu"), store=store, rank=rank, world_size=world)
    work = collectives(rank, world)
    if content is not None:
        work = training(make_trainer(parse_spec(content), out, recorder))
    said: dict[str, Any] = {}
    for name, call in work:
        call()  # connections are made, buffers found
        before = cells(recorder)
        meet(store, f"{name}/before", world)
        wire = sent_by_peer(port)
        meet(store, f"{name}/start", world)
        for _ in range(CALLS):
            call()
        meet(store, f"{name}/done", world)
        after = sent_by_peer(port)
        after.subtract(wire)
        said[name] = {"wire": after, "metered": [(*key, *now) for key, now in difference(cells(recorder), before)]}
        meet(store, f"{name}/after", world)
    (out / f"rank-{rank}.json").write_text(json.dumps(said))
    if rank:
        store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world - 1:  # it keeps the store
        time.sleep(0.01)
    os._exit(0)


def meet(store: dist.TCPStore, key: str, world: int) -> None:
    """A barrier over the store alone."""
    if store.add(key, 1) == world:
        store.set(f"{key}/all", "yes")
    store.wait([f"{key}/all"])


def cells(recorder: Recorder) -> dict[tuple[str, str, int], tuple[int, int]]:
    return {(c["op"], c["axis"], c["group_size"]): (c["count"], c["payload_bytes"]) for c in recorder.cells()}


def difference(
    now: dict[tuple[str, str, int], tuple[int, int]], before: dict[tuple[str, str, int], tuple[int, int]]
) -> Iterator[tuple[tuple[str, str, int], tuple[int, int]]]:
    for key, (count, payload) in now.items():
        old_count, old_payload = before.get(key, (0, 0))
        if count != old_count:
            yield key, (count - old_count, payload - old_payload)


if __name__ == "__main__":
    main()
