"""When a collective ended, and how long the training thread stood still for it.

gloo's send, receive and reduce-scatter works have no future: their end is known when the caller waits.
NCCL's works end on the device: they are asked, never waited for, so the device is not synchronised. There what stands
still is the stream that computes, between two events round the wait. A wait in torch's own C++ (DDP's for its futures,
that of FSDP's streams for one another) is not seen: what it stands still for counts as hidden.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workers.meter.collectives import Collective
from workers.torch_private.groups import duration_s, never_compiled

T = TypeVar("T")
MAIN_THREAD = threading.main_thread().ident
create_timing_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)

# Methods of `Work` answered by the wrapped work; `wait` is ours.
FORWARDED = (
    "block_current_stream",
    "exception",
    "get_future",
    "get_future_result",
    "is_completed",
    "is_success",
    "result",
    "source_rank",
    "_source_rank",
    "synchronize",
    "_get_duration",
    "_get_op_type",
)


class MeteredWork(dist.Work):
    """A work whose pending record is complete when a caller has waited for it, if it was not before."""

    def __init__(
        self, work: dist.Work, pending: Collective, *, at_once: bool = False, calls_back: bool = False
    ) -> None:
        """`at_once`: the caller does nothing but wait, from the start. `calls_back`: its end is told without a wait."""
        super().__init__()
        self.work = work
        self._pending = pending
        self._since_s = pending.started_s if at_once else 0.0
        self._calls_back = calls_back

    @never_compiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the wrapped work does; zero means the group's own timeout."""
        try:
            return time_wait(self._pending, self._since_s, self.work.wait, timeout)
        except BaseException:
            self._is_left()
            raise

    def __del__(self) -> None:
        self._is_left()

    def _is_left(self) -> None:
        if not self._calls_back:
            self._pending.abandon()


class MeteredNcclWork(dist.Work):
    """One of NCCL's: a wait makes the current stream stand still, not the thread."""

    def __init__(self, work: dist.Work, pending: Collective, poller: NcclPoller) -> None:
        super().__init__()
        self.work, self._pending, self._poller = work, pending, poller

    @never_compiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not is_training_thread() or on_side_stream():
            return self.work.wait(timeout)
        start, end = create_timing_event(), create_timing_event()
        start.record()
        done = self.work.wait(timeout)
        end.record()
        self._poller.watch_wait(start, end, self._pending)
        return done


def time_wait(pending: Collective, since_s: float, wait: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What `wait` returns, when a collective has ended. The caller stands still since `since_s`, or now where 0."""
    if pending.ended_s or not is_training_thread():
        done = wait(*args, **kwargs)
        pending()
        return done
    recorder = pending.recorder
    since_s = since_s or time.perf_counter()
    recorder.blocking = pending
    try:
        done = wait(*args, **kwargs)
        now_s = time.perf_counter()
    finally:
        recorder.blocking = None
    pending.complete(now_s - pending.started_s)
    pending.add_blocked_time(now_s - since_s)
    return done


def is_training_thread() -> bool:
    """Whether the main thread runs this, or one of autograd's own, which Python did not start."""
    if threading.get_ident() == MAIN_THREAD:
        return True
    return isinstance(threading.current_thread(), threading._DummyThread)


def on_side_stream() -> bool:
    """Whether what is issued now waits beside what computes."""
    return torch.cuda.current_stream() != torch.cuda.default_stream()


def _forward(name: str) -> Any:
    def method(self: MeteredWork | MeteredNcclWork, *args: Any) -> Any:
        return getattr(self.work, name)(*args)

    method.__name__ = name
    return never_compiled(method)


for _name in FORWARDED:
    for _wrapper in (MeteredWork, MeteredNcclWork):
        setattr(_wrapper, _name, _forward(_name))


class NcclPoller:
    """Completes pending records from CUDA events that have passed, in the order they were issued."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, list[Collective]]] = deque()
        self._events: deque[tuple[Any, Any, Collective, bool]] = deque()  # torch publishes no types for events
        self._waits: deque[tuple[Any, Any, Collective]] = deque()
        self._lock = threading.Lock()

    def watch_work(self, work: dist.Work, pending: list[Collective]) -> None:
        """An asynchronous work on NCCL's own stream, timed by NCCL; `pending` holds all it carries."""
        self._works.append((work, pending))

    def watch_events(
        self, start: torch.cuda.Event, end: torch.cuda.Event, pending: Collective, *, computes: bool = False
    ) -> None:
        """A collective on the current stream (NCCL then returns no work), between two timed events. `computes`: the
        stream is the one that computes, which stands still meanwhile."""
        self._events.append((start, end, pending, computes))

    def watch_wait(self, start: torch.cuda.Event, end: torch.cuda.Event, pending: Collective) -> None:
        """The stream that computes stands still for a collective, between two timed events."""
        self._waits.append((start, end, pending))

    def poll(self) -> None:
        """Complete what has finished since the last poll."""
        with self._lock:
            for _ in range(len(self._works)):
                work, carried = self._works.popleft()
                if not work.is_completed():
                    self._works.append((work, carried))
                    continue
                for pending in carried:
                    pending.complete(duration_s(work))
            while self._events and self._events[0][1].query():
                start, end, pending, computes = self._events.popleft()
                seconds = start.elapsed_time(end) / 1000
                pending.complete(seconds)
                if computes:
                    pending.add_blocked_time(seconds)
            while self._waits and self._waits[0][1].query():
                start, end, pending = self._waits.popleft()
                pending.add_blocked_time(start.elapsed_time(end) / 1000)
