"""Works that record when a collective ended, and how long the training thread waited for it.

Gloo's send, receive and reduce-scatter works have no future, so their end is known when the caller waits. NCCL's works
end on the device and are polled, so that the device is never synchronized. A wait for an NCCL work blocks the compute
stream, which two events around the wait measure. A wait in torch's C++ code (DDP for its futures, FSDP between streams)
is invisible, so its time counts as overlapped.
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
from workers.torch_private.groups import get_duration_s, skip_dynamo

T = TypeVar("T")
MAIN_THREAD = threading.main_thread().ident
create_timing_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)

# Methods of `Work` that are forwarded to the native work. `wait` is overridden.
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
    """Work of gloo. A wait completes the collective if its future has not."""

    def __init__(
        self, work: dist.Work, collective: Collective, *, is_sync: bool = False, has_callback: bool = False
    ) -> None:
        """Wrap a native work.

        Args:
            is_sync: The caller waits from the start.
            has_callback: A future reports the end, even without a wait.
        """
        super().__init__()
        self.work = work
        self._collective = collective
        self._since_s = collective.started_s if is_sync else 0.0
        self._has_callback = has_callback

    @skip_dynamo
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the native work. A timeout of zero is the timeout of the group."""
        try:
            return time_wait(self._collective, self._since_s, self.work.wait, timeout)
        except BaseException:
            self._abandon()
            raise

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if not self._has_callback:
            self._collective.abandon()


class MeteredNcclWork(dist.Work):
    """Work of NCCL. A wait blocks the current stream, not the thread."""

    def __init__(self, work: dist.Work, collective: Collective, poller: NcclPoller) -> None:
        super().__init__()
        self.work, self._collective, self._poller = work, collective, poller

    @skip_dynamo
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not is_training_thread() or on_side_stream():
            return self.work.wait(timeout)
        start, end = create_timing_event(), create_timing_event()
        start.record()
        done = self.work.wait(timeout)
        end.record()
        self._poller.watch_wait(start, end, self._collective)
        return done


def time_wait(collective: Collective, since_s: float, wait: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `wait`, then complete the collective with the time that the training thread was blocked.

    Args:
        since_s: Start of the wait, or 0 for now.
    """
    if collective.ended_s or not is_training_thread():
        done = wait(*args, **kwargs)
        collective()
        return done
    recorder = collective.recorder
    since_s = since_s or time.perf_counter()
    recorder.blocking = collective
    try:
        done = wait(*args, **kwargs)
        now_s = time.perf_counter()
    finally:
        recorder.blocking = None
    collective.complete(now_s - collective.started_s)
    collective.add_blocked_time(now_s - since_s)
    return done


def is_training_thread() -> bool:
    """Return True on the main thread and on autograd's threads, which Python did not start."""
    if threading.get_ident() == MAIN_THREAD:
        return True
    return isinstance(threading.current_thread(), threading._DummyThread)


def on_side_stream() -> bool:
    """Return True if the current stream is not the compute stream."""
    return torch.cuda.current_stream() != torch.cuda.default_stream()


def _forward(name: str) -> Any:
    def method(self: MeteredWork | MeteredNcclWork, *args: Any) -> Any:
        return getattr(self.work, name)(*args)

    method.__name__ = name
    return skip_dynamo(method)


for _name in FORWARDED:
    for _wrapper in (MeteredWork, MeteredNcclWork):
        setattr(_wrapper, _name, _forward(_name))


class NcclPoller:
    """Complete collectives on a device when their works and CUDA events have passed, in the order of issue."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, list[Collective]]] = deque()
        self._events: deque[tuple[Any, Any, Collective, bool]] = deque()  # torch publishes no types for events
        self._waits: deque[tuple[Any, Any, Collective]] = deque()
        self._lock = threading.Lock()

    def watch_work(self, work: dist.Work, collectives: list[Collective]) -> None:
        """Watch an asynchronous work on NCCL's stream, which NCCL times, with all its collectives."""
        self._works.append((work, collectives))

    def watch_events(
        self, start: torch.cuda.Event, end: torch.cuda.Event, collective: Collective, *, blocks_compute: bool = False
    ) -> None:
        """Watch a collective on the current stream, for which NCCL returns no work, between two timed events."""
        self._events.append((start, end, collective, blocks_compute))

    def watch_wait(self, start: torch.cuda.Event, end: torch.cuda.Event, collective: Collective) -> None:
        """Watch a wait of the compute stream for a collective, between two timed events."""
        self._waits.append((start, end, collective))

    def poll(self) -> None:
        """Complete the collectives that ended since the last poll."""
        with self._lock:
            for _ in range(len(self._works)):
                work, collectives = self._works.popleft()
                if not work.is_completed():
                    self._works.append((work, collectives))
                    continue
                for collective in collectives:
                    collective.complete(get_duration_s(work))
            while self._events and self._events[0][1].query():
                start, end, collective, blocks_compute = self._events.popleft()
                seconds = start.elapsed_time(end) / 1000
                collective.complete(seconds)
                if blocks_compute:
                    collective.add_blocked_time(seconds)
            while self._waits and self._waits[0][1].query():
                start, end, collective = self._waits.popleft()
                collective.add_blocked_time(start.elapsed_time(end) / 1000)
