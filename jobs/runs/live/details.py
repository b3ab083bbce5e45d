"""A job as its pages show it, made once for all who look at about the same time. Who may look is asked of each."""

from __future__ import annotations

import threading

from jobs.core.job_details import JobDetail, job_detail
from jobs.models import Job

FRESH_S = 1.0
MOST = 256


class Detail:
    """Of one job. `read`: monotonic seconds just before it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read = float("-inf")
        self.detail: JobDetail | None = None


_details: dict[str, Detail] = {}
_lock = threading.Lock()


def shared_detail(job: Job, read: float, not_before: float) -> JobDetail:
    """As it was no earlier than `not_before`; `job` was read just after `read`, both in monotonic seconds."""
    with _lock:
        if job.id not in _details and len(_details) >= MOST:
            _details.clear()
        shared = _details.setdefault(job.id, Detail())
    with shared.lock:
        if shared.detail is None or shared.read < not_before:
            shared.read, shared.detail = read, job_detail(job)
        return shared.detail
