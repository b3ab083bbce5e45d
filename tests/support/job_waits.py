"""Wait for states of jobs, and record how jobs ended for the table of `make faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.processes import wait_until


class Ending(NamedTuple):
    """Result of a job, and the number of its processes that still lived when the job ended."""

    result: str
    num_processes_left: int


endings: list[Ending] = []  # of the running test


def record_ending(status: str, reason: str, num_processes_left: int) -> None:
    endings.append(Ending(f"{status}: {reason}", num_processes_left))


def wait_for_status(
    get_job: Callable[[], dict[str, Any] | None], job: str, statuses: tuple[str, ...], timeout_s: float
) -> dict[str, Any]:
    """Return the REST representation of a job as soon as it has one of these statuses.

    Args:
        get_job: Read the job, or return None if it does not exist yet.
        job: Name of the job in messages.

    Raises:
        AssertionError: The job has another final status, or the time is over.
    """
    expected = f"{job} is {' or '.join(statuses)}"
    seen: dict[str, Any] | None = None

    def has_status() -> bool:
        nonlocal seen
        seen = get_job() or seen
        if seen is None or seen["status"] in statuses:
            return seen is not None
        assert not seen["finished"], f"waited until {expected}, but {describe_job(seen)}"
        return False

    try:
        wait_until(has_status, expected, timeout_s, 0.2)
    except AssertionError as error:
        if seen is not None and not seen["finished"]:
            error.add_note(f"At the end, {describe_job(seen)}")
        raise
    assert seen is not None
    return seen


def describe_job(job: dict[str, Any]) -> str:
    """Return the status of a job with its reason and last log lines."""
    reason = job["history"][-1]["reason"] if job["history"] else "no reason"
    return f"it is {job['status']}: {reason}{_format_log_tail(job['exit'])}"


def check_not_exited(report: dict[str, Any] | None, expected: str) -> None:
    """Fail if an attempt has ended before `expected` was seen. `report` is its exit report."""
    assert report is None, (
        f"waited until {expected}, but the attempt {report['outcome']}: {report['reason']}{_format_log_tail(report)}"
    )


def _format_log_tail(report: dict[str, Any] | None) -> str:
    return "".join(f"\n  {line}" for line in (report or {}).get("log_tail", ()))
