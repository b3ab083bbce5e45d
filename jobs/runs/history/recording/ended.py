"""How an attempt ended: one outcome for all who tell of it, the one that the queue gave its job."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.models import TERMINAL, Attempt, StateChange


class Ended(NamedTuple):
    """`outcome` is None where nobody said. `report`: of its host, with the queue's reason where the queue differs."""

    outcome: str | None
    report: dict[str, Any]


def ended(attempt: int) -> Ended:
    """By the key of an attempt's row. A host may tell of ranks that failed as they were cancelled, or of nothing."""
    row = Attempt.objects.only("job_id", "number", "exit").get(pk=attempt)
    report: dict[str, Any] = row.exit or {}
    changes = StateChange.objects.filter(job=row.job_id, attempt=row.number, status__in=TERMINAL)
    last = changes.order_by("-id").values_list("status", "reason").first()
    if last is None or last[0] == report.get("outcome"):
        return Ended(report.get("outcome"), report)
    return Ended(last[0], {**report, "reason": last[1]})
