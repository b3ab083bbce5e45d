"""Times of a step on the clock of the host, or on the compute stream of a GPU.

The host runs ahead of a GPU, so an event on the compute stream marks each time. Nothing waits for an event: the thread
of the exporter reads the events that have passed.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from workers.meter.work import create_timing_event


class Moment(NamedTuple):
    """A time in seconds of `time.perf_counter`, and an event on the compute stream if a GPU is in use."""

    host_s: float
    event: Any = None  # torch publishes no types for events

    def has_passed(self) -> bool:
        return self.event is None or bool(self.event.query())


def uses_device() -> bool:
    """Return True if the compute stream of a GPU can record an event now. A captured graph would repeat the event."""
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


def now() -> Moment:
    """Return the current time."""
    if not uses_device():
        return Moment(time.perf_counter())
    event = create_timing_event()
    event.record()
    return Moment(time.perf_counter(), event)


def compute_seconds(start: Moment, end: Moment) -> float:
    """Return the seconds between two moments that have passed."""
    if start.event is None or end.event is None:  # a graph was captured at one of them
        return end.host_s - start.host_s
    try:
        return max(0.0, float(start.event.elapsed_time(end.event)) / 1000)
    except RuntimeError:  # events of two GPUs
        return end.host_s - start.host_s
