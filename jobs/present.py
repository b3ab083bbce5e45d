"""A job as JSON: the REST detail, the page's data and the websocket's state message are all this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jobs.models import TERMINAL, Attempt, Job, Member


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
    attempt = job.attempts.filter(number=job.attempt).prefetch_related("members").first()
    history = [
        {"status": c.status, "attempt": c.attempt, "reason": c.reason, "at": c.at.isoformat()}
        for c in job.history.all()
    ]
    return {
        **job_brief(job),
        "finished": job.status in TERMINAL,
        "host": attempt.where() if attempt else None,
        "members": [_member(member) for member in attempt.members.all()] if attempt else [],
        "exit": attempt.exit if attempt else None,
        "note": "; ".join(_notes(attempt)) if attempt else "",
        "history": history,
        "spec": job.spec,
        "estimate": job.estimate,
        "chosen": job.chosen,
    }


def _member(member: Member) -> dict[str, Any]:
    return {
        "node": member.node,
        "host": member.host_name,
        "first_rank": member.first_rank,
        "num_ranks": member.num_ranks,
        "ended": member.ended.isoformat() if member.ended else None,
        "outcome": member.outcome,
        "reason": member.reason,
    }


def _notes(attempt: Attempt) -> Iterator[str]:
    """What hosts say of their part of it, each with its name where there are several."""
    members = attempt.members.all()
    for member in members:
        if member.note:
            yield member.note if len(members) == 1 else f"{member.host_name}: {member.note}"
