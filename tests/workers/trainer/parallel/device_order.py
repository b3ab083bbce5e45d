"""Whether ranks that run on NCCL would wait for one another for ever, found without a GPU.

A dry rank's calls and waits are written down, and played as NCCL plays them. gloo forgives what NCCL does not: there a
collective or message runs on a stream, begins when what its stream and the computing one hold is over, and ends only
together with its counterparts; a send keeps nothing for a receiver that comes later. As torch 2.13's
`ProcessGroupNCCL.cpp` has it, a group has a stream for its collectives and batches, and one for the single messages of
each pair (`getKeySendRecv`); a group that was connected (`eagerInit_`) has one for all. Each stream has a communicator,
made at its first use where nobody connected it: whoever calls then waits, with all that it is to do next, until every
member does. What a caller waits for at once runs on the computing stream itself.

Streams may also share one of the queues to a GPU, and what is first in it then keeps back what is behind: `one_queue`
plays a GPU that has a single one. So four of four pipes hung on a real GPU that ranks shared (2026-11-26, NCCL 2.28).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from contracts.telemetry.items import Op
from planner.facts.spec import JobSpec
from workers import dry_run
from workers.dry_run import run_dry_step
from workers.meter.process_group import CollectiveBytes, _is_async, patch_batch_isend_irecv
from workers.trainer.parallel import mesh, pipeline_parallel
from workers.trainer.parallel.pipeline_parallel import SendQueue

SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv")  # alike on every rank


class Call(NamedTuple):
    """`peer` by global rank; `batch` is None for a call of its own."""

    op: Op
    group: str
    size: int
    peer: int | None
    payload_bytes: int
    at_once: bool
    batch: int | None


class Wait(NamedTuple):
    """For calls, by their place in the list."""

    calls: tuple[int, ...]


class Connect(NamedTuple):
    """Of a group, or of this rank and `peer` for its messages."""

    group: str
    size: int
    peer: int | None


Trace = list[Call | Wait | Connect]


class _Told(dist.Work):
    def __init__(self, trace: Trace, calls: tuple[int, ...]) -> None:
        super().__init__()
        self._trace, self._calls = trace, calls

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._trace.append(Wait(self._calls))
        return True

    def is_completed(self) -> bool:
        return False


@contextmanager
def written_down(trace: Trace) -> Iterator[None]:
    """Inside, dry groups write into `trace` what is asked of them, as it would be asked on a GPU."""

    class Writing(dry_run.DryProcessGroup):
        _batch: int | None = None

        def __init__(self, native: Any, name: str, recorder: Any, devices: Any, ranks: Sequence[int]) -> None:
            super().__init__(native, name, recorder, devices, ranks)
            self._ranks = list(ranks)

        def _run(
            self,
            method: str,
            op: Op,
            carried: CollectiveBytes,
            args: Sequence[Any],
            kwargs: dict[str, Any],
            poller: object,
        ) -> Any:
            super()._run(method, op, carried, args, kwargs, poller)
            peer = None if carried.peer is None else self._ranks[carried.peer]
            at_once = not _is_async(args, kwargs)
            trace.append(Call(op, self._name, len(self._ranks), peer, carried.payload_bytes, at_once, self._batch))
            return _Told(trace, (len(trace) - 1,))

        def batches(self, device: torch.device) -> bool:
            return True

        def _start_coalescing(self, device: torch.device) -> None:
            self._batch = len(trace)

        def _end_coalescing(self, device: torch.device) -> Any:
            first, self._batch = self._batch, None
            assert first is not None
            return _Told(trace, tuple(range(first, len(trace))))

    def connected(group: Any) -> None:
        trace.append(Connect(group._name, len(group._ranks), None))

    def pair_connected(group: Any, peer: int, *, sends: bool) -> None:
        trace.append(Connect(group._name, 2, group._ranks[peer]))

    def keep(self: SendQueue, work: dist.Work, sent: torch.Tensor) -> None:
        self._pending.append((work, sent))

    with pytest.MonkeyPatch.context() as patch:
        for module in (dist, dist.distributed_c10d):
            patch.setattr(module, "batch_isend_irecv", module.batch_isend_irecv)  # so that it comes back
        patch_batch_isend_irecv()
        patch.setattr(dry_run, "DryProcessGroup", Writing)
        patch.setattr(SendQueue, "add", keep)
        patch.setattr(mesh, "connect", connected)
        patch.setattr(pipeline_parallel, "connect_pair", pair_connected)
        yield


def traces(spec: JobSpec) -> list[Trace]:
    """Of a step of every rank."""
    found: list[Trace] = []
    for rank in range(spec.layout.world_size):
        trace: Trace = []
        with written_down(trace):
            run_dry_step(spec, rank)
        found.append(trace)
    return found


class Played:
    """What begins after what, all ranks together. A call and its counterparts on other ranks are one event, and so is
    the making of a communicator."""

    def __init__(self, ranks: Sequence[Trace], *, one_queue: bool = False) -> None:
        self._one_queue = one_queue
        self._after: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        self._members: defaultdict[Hashable, list[tuple[int, Call | Connect]]] = defaultdict(list)
        for rank, trace in enumerate(ranks):
            self._play(rank, trace)

    def _play(self, rank: int, trace: Trace) -> None:
        streams: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # the last events on each
        computing: set[Hashable] = set()
        host: set[Hashable] = set()
        counts: defaultdict[Hashable, int] = defaultdict(int)
        events: list[Hashable] = []
        connected: set[Hashable] = set()
        batch: tuple[int, set[Hashable]] | None = None
        queued: set[Hashable] = set()  # what was asked for last
        for call in trace:
            if isinstance(call, Wait):
                computing = computing | {events[index] for index in call.calls}
                events.append(None)
                continue
            stream = _stream(rank, call, connected)
            if stream not in connected:
                connected.add(stream)
                made = ("communicator", stream)
                size = 2 if isinstance(stream, tuple) else call.size
                self._members[made].append((rank, Connect(call.group, size, None)))
                self._after[made] |= host
                host = {made}
            if isinstance(call, Connect):
                events.append(None)
                continue
            event = _event(rank, call, counts)
            events.append(event)
            self._members[event].append((rank, call))
            if call.batch is None or batch is None or batch[0] != call.batch:
                before, streams[stream] = streams[stream] | queued, set()
                queued = set()
                batch = None if call.batch is None else (call.batch, before)
            else:
                before = batch[1]
            self._after[event] |= before | computing | host
            streams[stream].add(event)
            if self._one_queue:
                queued.add(event)
            if call.at_once:
                computing = {event}

    def unlike(self) -> list[str]:
        """Events whose members do not fit together."""
        return [f"{event}: {members}" for event, members in self._members.items() if not _fit(members)]

    def stuck(self) -> list[str]:
        """Events that wait for one another, in a ring; none where everything ends."""
        left = {event: set(before) for event, before in self._after.items()}
        users: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        for event, before in left.items():
            for one in before:
                users[one].append(event)
        ready = [event for event, before in left.items() if not before]
        while ready:
            over = ready.pop()
            del left[over]
            for event in users[over]:
                left[event].discard(over)
                if not left[event]:
                    ready.append(event)
        return [f"{event}: {self._members[event]}" for event in _ring(left)]


def _stream(rank: int, call: Call | Connect, connected: set[Hashable]) -> Hashable:
    """The one that a call runs on."""
    alone = call.peer is not None and (isinstance(call, Connect) or call.batch is None)
    if not alone or call.group in connected:
        return call.group
    return (call.group, frozenset((rank, call.peer)))


def _event(rank: int, call: Call, counts: defaultdict[Hashable, int]) -> Hashable:
    key: Hashable = call.group
    if call.peer is not None:
        key = (call.group, (rank, call.peer) if call.op == "send" else (call.peer, rank))
    counts[key] += 1
    return (key, counts[key])


def _fit(members: Iterable[tuple[int, Call | Connect]]) -> bool:
    met = [one for _, one in members]
    calls = [one for one in met if isinstance(one, Call)]
    if not calls:
        return len(met) == met[0].size
    first = calls[0]
    if first.peer is not None:
        return (
            sorted(call.op for call in calls) == ["recv", "send"] and calls[0].payload_bytes == calls[1].payload_bytes
        )
    sizes = {call.payload_bytes for call in calls if call.op in SIZED}
    return len(calls) == first.size and len({call.op for call in calls}) == 1 and len(sizes) <= 1


def _ring(left: dict[Hashable, set[Hashable]]) -> list[Hashable]:
    if not left:
        return []
    path = [next(iter(left))]
    while True:
        following = next(iter(left[path[-1]]))
        if following in path:
            return path[path.index(following) :]
        path.append(following)
