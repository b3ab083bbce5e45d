"""Jobs as lines of the list, and how far each run is."""

from __future__ import annotations

import logging
from typing import Any

import msgpack
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.connection import connect
from jobs.kinds import kind_of, layout_words
from jobs.models import ON_A_HOST, TERMINAL, Attempt, Job

log = logging.getLogger(__name__)

NEWEST_ENTRIES = 10


def list_rows(jobs: list[Job]) -> list[dict[str, Any]]:
    """What the table shows. `step` is None where nothing is known, `steps` where none were asked for."""
    steps = {**_steps_of_ended(jobs), **_steps_of_running(jobs)}
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
            "step": steps.get(job.id),
            "steps": kind_of(job.spec).steps_asked(job.spec),
            "created": job.created,
        }
        for job in jobs
    ]


def _steps_of_ended(jobs: list[Job]) -> dict[str, int]:
    current = {(job.id, job.attempt) for job in jobs if job.status in TERMINAL}
    found = Attempt.objects.filter(job__in=[job for job, _ in current]).values_list(
        "job_id", "number", "exit__summary__steps"
    )
    return {job: steps for job, number, steps in found if (job, number) in current and steps is not None}


def _steps_of_running(jobs: list[Job]) -> dict[str, int]:
    """From the newest telemetry; a run whose last entries tell of no step is left out."""
    running = [job for job in jobs if job.status in ON_A_HOST]
    if not running:
        return {}
    try:
        with connect() as client, client.pipeline(transaction=False) as pipe:
            for job in running:
                pipe.xrevrange(telemetry_stream(job.id, job.attempt), count=NEWEST_ENTRIES)
            answers = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("the list goes without progress: %s", error)
        return {}
    steps = {}
    for job, entries in zip(running, answers, strict=True):
        items = [item for _, fields in entries for item in msgpack.unpackb(fields[b"b"])["items"]]
        done = [item["step"] for item in items if item["kind"] == "step"]
        if done:
            steps[job.id] = max(done)
    return steps
