"""Where the events of a step are: in the stream while Redis has it."""

from __future__ import annotations

from jobs.models import Job
from jobs.traces import stream
from jobs.traces.shapes import Trace


class NoTraceError(LookupError):
    """There are no events of that step; the message says so in words."""


def find(job: Job, attempt: int, step: int | None) -> tuple[int, Trace]:
    """A step and its events, the newest where none is named.

    Raises:
        NoTraceError: no rank told of it.
        AwayError: Redis could not be reached.
    """
    found = stream.trace_of(job, attempt, step)
    if found is None:
        words = "no step was told event by event" if step is None else f"step {step} was not told event by event"
        raise NoTraceError(f"attempt {attempt}: {words}; ask for one while it runs")
    return found
