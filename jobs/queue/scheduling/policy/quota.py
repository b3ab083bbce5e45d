"""A project holds no more slots at once than its quota."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.queue.scheduling.states import Quota, Waiting
from planner.facts.words import counted


class Quotas:
    """What each project holds while a pass goes through the queue."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._used = {project: quota.used for project, quota in quotas.items()}
        self._full: set[str] = set()

    def refusal(self, job: Waiting) -> str:
        """Why its project's quota does not allow the job now; empty where it does."""
        quota = self._quotas.get(job.project)
        if quota is None or quota.slots is None:
            return ""
        needs = f"needs {counted(job.num_slots, 'slot')}; project {job.project}"
        if job.num_slots > quota.slots:
            return f"{needs} may hold {quota.slots}"
        if job.project in self._full:
            return f"{needs} may hold {quota.slots}, and a job of its ahead waits for them"
        if self._used[job.project] + job.num_slots <= quota.slots:
            return ""
        self._full.add(job.project)
        return f"{needs} may hold {quota.slots}, and {self._used[job.project]} are held or kept for jobs of its ahead"

    def take(self, job: Waiting) -> None:
        """It holds its slots, or they are kept for it."""
        if job.project in self._used:
            self._used[job.project] += job.num_slots
