"""Jobs as lines of the list."""

from __future__ import annotations

from typing import Any

from jobs.kinds import kind_of, layout_words
from jobs.models import Job
from jobs.pages.progress import steps_of


def list_rows(jobs: list[Job]) -> list[dict[str, Any]]:
    """What the table shows. `step` is None where nothing is known, `steps` where none were asked for."""
    done = steps_of(jobs)
    return [
        {
            "id": job.id,
            "name": job.name,
            "owner": job.owner.get_username(),
            "kind": kind_of(job.spec).title,
            "subject": kind_of(job.spec).subject(job.spec),
            "layout": layout_words(job.spec),
            "status": job.status,
            "wait_reason": job.wait_reason,
            "step": done.get(job.id),
            "steps": kind_of(job.spec).steps_asked(job.spec),
            "created": job.created,
        }
        for job in jobs
    ]
