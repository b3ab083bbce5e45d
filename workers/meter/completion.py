"""When a collective ended, for backends that do not call back.

gloo's send, receive and reduce-scatter works have no future: their end is known when the caller waits.
NCCL's works end on the device: they are asked, never waited for, so the device is not synchronised.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from workers.meter.recorder import Pending
from workers.torch_private.groups import duration_s

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


class CompletedOnWait(dist.Work):
    """A work whose pending record completes when its caller has waited for it."""

    def __init__(self, work: dist.Work, pending: Pending) -> None:
        super().__init__()
        self.work = work
        self._pending = pending

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait as the wrapped work does; zero means the group's own timeout."""
        done = self.work.wait(timeout)
        self._pending()
        return done


def _forward(name: str) -> Any:
    def method(self: CompletedOnWait, *args: Any) -> Any:
        return getattr(self.work, name)(*args)

    method.__name__ = name
    return method


for _name in FORWARDED:
    setattr(CompletedOnWait, _name, _forward(_name))


class DevicePoller:
    """Completes pending records from CUDA events that have passed, in the order they were issued."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, list[Pending]]] = deque()
        self._events: deque[tuple[Any, Any, Pending]] = deque()  # torch publishes no types for events
        self._lock = threading.Lock()

    def watch_work(self, work: dist.Work, pending: list[Pending]) -> None:
        """An asynchronous work on NCCL's own stream, timed by NCCL; `pending` holds all it carries."""
        self._works.append((work, pending))

    def watch_events(self, start: torch.cuda.Event, end: torch.cuda.Event, pending: Pending) -> None:
        """A collective on the current stream (NCCL then returns no work), between two timed events."""
        self._events.append((start, end, pending))

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
                start, end, pending = self._events.popleft()
                pending.complete(start.elapsed_time(end) / 1000)
