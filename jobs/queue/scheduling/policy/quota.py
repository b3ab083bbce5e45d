"""A project holds no more slots at once than its quota."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.queue.scheduling.states import Quota
from planner.facts.validation import format_count


class Quotas:
    """What each project holds while a pass goes through the queue."""

    def __init__(self, quotas: Mapping[str, Quota]) -> None:
        self._quotas = quotas
        self._used = {project: quota.used for project, quota in quotas.items()}
        self._full: set[str] = set()

    def refusal(self, project: str, slots: int) -> str:
        """Why the project's quota does not allow a job of so many slots now; empty where it does."""
        quota = self._quotas.get(project)
        if quota is None or quota.slots is None:
            return ""
        limit = f"Project {project} is limited to {format_count(quota.slots, 'slot')}."
        needs = f"The job needs {format_count(slots, 'slot')}. {limit}"
        if slots > quota.slots:
            return needs
        if project in self._full:
            return f"{needs} Another job of the project is ahead in the queue."
        if self._used[project] + slots <= quota.slots:
            return ""
        self._full.add(project)
        return f"{needs} Other jobs of the project use or reserve {format_count(self._used[project], 'slot')}."

    def take(self, project: str, slots: int) -> None:
        """A job of the project holds so many, or they are kept for it."""
        if project in self._used:
            self._used[project] += slots
