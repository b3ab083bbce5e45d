"""Find deadlocks between ranks on NCCL without a GPU.

The module records the calls and waits of dry ranks, and replays them by the rules of NCCL. gloo is more tolerant.
On NCCL, a collective or message runs on a stream. It begins when earlier work of its stream and of the compute
stream is done, and ends only together with its counterparts. A send keeps no data for a later receive.

In `ProcessGroupNCCL.cpp` of torch 2.13, a group has a stream for collectives and batches. Single messages of each
pair have another (`getKeySendRecv`). A group with eager connections (`eagerInit_`) has one stream for all.
Each stream has a communicator, which its first use creates. The caller then blocks until every member calls.
A synchronous call runs on the compute stream.

Streams may share a hardware queue of the GPU, where the first call blocks the next. `one_queue` models a GPU with
a single queue. Four of four pipelines hung on a GPU that ranks shared (2026-11-26, NCCL 2.28).
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

SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv")  # equal on every rank


class Call(NamedTuple):
    """Store a call. `peer` is a global rank. `batch` is None for a single call."""

    op: Op
    group: str
    size: int
    peer: int | None
    payload_bytes: int
    at_once: bool
    batch: int | None


class Wait(NamedTuple):
    """Wait for calls, which are positions in the list."""

    calls: tuple[int, ...]


class Connect(NamedTuple):
    """Connect a group, or this rank with `peer` for their messages."""

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
    """Record calls of dry groups in `trace`, in the order for a GPU."""

    class RecordingGroup(dry_run.DryProcessGroup):
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
            patch.setattr(module, "batch_isend_irecv", module.batch_isend_irecv)  # returned afterwards
        patch_batch_isend_irecv()
        patch.setattr(dry_run, "DryProcessGroup", RecordingGroup)
        patch.setattr(SendQueue, "add", keep)
        patch.setattr(mesh, "connect", connected)
        patch.setattr(pipeline_parallel, "connect_pair", pair_connected)
        yield


def record_traces(spec: JobSpec) -> list[Trace]:
    """Return the trace of a step for every rank."""
    found: list[Trace] = []
    for rank in range(spec.layout.world_size):
        trace: Trace = []
        with written_down(trace):
            run_dry_step(spec, rank)
        found.append(trace)
    return found


class ReplayedStep:
    """Order of events of all ranks.

    A call and its counterparts on other ranks are one event. The creation of a communicator is also one event.
    """

    def __init__(self, ranks: Sequence[Trace], *, one_queue: bool = False) -> None:
        self._one_queue = one_queue
        self._after: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
        self._members: defaultdict[Hashable, list[tuple[int, Call | Connect]]] = defaultdict(list)
        for rank, trace in enumerate(ranks):
            self._play(rank, trace)

    def _play(self, rank: int, trace: Trace) -> None:
        streams: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # the last events on each stream
        computing: set[Hashable] = set()
        host: set[Hashable] = set()
        counts: defaultdict[Hashable, int] = defaultdict(int)
        events: list[Hashable] = []
        connected: set[Hashable] = set()
        batch: tuple[int, set[Hashable]] | None = None
        queued: set[Hashable] = set()  # the newest request
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
        """Return events whose members do not match."""
        return [f"{event}: {members}" for event, members in self._members.items() if not _fit(members)]

    def stuck(self) -> list[str]:
        """Return events that wait for each other in a cycle, or an empty list if every event ends."""
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
    """Return the stream on which a call runs."""
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
