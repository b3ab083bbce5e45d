"""A job as JSON: the REST detail, the page's data and the websocket's state message are all this."""

from __future__ import annotations

from typing import Any

from jobs.models import TERMINAL, Job


def job_brief(job: Job) -> dict[str, Any]:
    """One line of a list."""
    return {
        "id": job.id,
        "name": job.name,
        "owner": job.owner.get_username(),
        "status": job.status,
        "attempt": job.attempt,
        "priority": job.priority,
        "wait_reason": job.wait_reason,
        "layout": job.spec["layout"],
        "world_size": job.world_size,
        "created": job.created.isoformat(),
        "changed": job.changed.isoformat(),
    }


def job_detail(job: Job) -> dict[str, Any]:
    """Everything about a job but its telemetry."""
    attempt = job.attempts.filter(number=job.attempt).select_related("host").first()
    history = [
        {"status": c.status, "attempt": c.attempt, "reason": c.reason, "at": c.at.isoformat()}
        for c in job.history.all()
    ]
    return {
        **job_brief(job),
        "finished": job.status in TERMINAL,
        "host": attempt.host.name if attempt else None,
        "exit": attempt.exit if attempt else None,
        "note": attempt.note if attempt else "",
        "history": history,
        "spec": job.spec,
        "estimate": job.estimate,
        "chosen": job.chosen,
    }
