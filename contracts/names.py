"""Celery task names, queue names and Redis keys shared by the controller, the web and the hosts."""

from __future__ import annotations

TASK_LAUNCH = "workers.launch"  # argument: LaunchOrder; starts a detached supervisor and returns
TASK_ACKNOWLEDGE = "workers.acknowledge"  # arguments: job, attempt; the exit report was stored

EVENTS_STREAM = "meshboard:events"  # hosts -> controller; field "b" holds one msgpack Event
TELEMETRY_MAXLEN = 50_000  # entries kept per attempt, about 2.5 hours at five a second


def host_queue(host: str) -> str:
    """Name of the Celery queue that only this host's worker reads."""
    return f"host.{host}"


def telemetry_stream(job: str, attempt: int) -> str:
    """Redis Stream of one attempt; each entry's field "b" holds one msgpack `Batch`."""
    return f"meshboard:telemetry:{job}:{attempt}"


def cancel_key(job: str, attempt: int) -> str:
    """Set by the controller while an attempt is CANCELLING; its supervisor polls it each second."""
    return f"meshboard:cancel:{job}:{attempt}"
