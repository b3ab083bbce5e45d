"""Jobs as lines of the list: the layout in words, and how far each run is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgpack
from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.connection import connect
from jobs.models import ON_A_HOST, TERMINAL, Attempt, Job
from planner.layout import SCHEDULE_NAMES

log = logging.getLogger(__name__)

NEWEST_ENTRIES = 10


def layout_words(layout: Mapping[str, Any]) -> str:
    """'pp2 x dp2 x tp2 · zero-1 · sp · 1F1B'; '1 rank' without any parallelism."""
    axes = [f"{axis}{layout[axis]}" for axis in ("pp", "dp", "cp", "ep", "tp") if layout.get(axis, 1) > 1]
    words = [" x ".join(axes) or "1 rank"]
    if layout["zero"]:
        words.append(f"zero-{layout['zero']}")
    if layout["sequence_parallel"]:
        words.append("sp")
    if layout["pp"] > 1:
        words.append(SCHEDULE_NAMES[layout["schedule"]])
    return " · ".join(words)


def model_words(model: Mapping[str, Any]) -> str:
    """The preset's name, or the sizes of a custom model."""
    if model["preset"]:
        return str(model["preset"])
    return f"{model['arch']}, {model['num_layers']} layers of {model['hidden_size']}"


def list_rows(jobs: list[Job]) -> list[dict[str, Any]]:
    """What the table shows. `step` is None where nothing is known, `steps` where there are none."""
    steps = {**_steps_of_ended(jobs), **_steps_of_running(jobs)}
    return [
        {
            "id": job.id,
            "name": job.name,
            "owner": job.owner.get_username(),
            "layout": layout_words(job.spec["layout"]),
            "status": job.status,
            "wait_reason": job.wait_reason,
            "step": steps.get(job.id),
            "steps": None if job.spec.get("kind") == "lab" else job.spec["train"]["steps"],
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
