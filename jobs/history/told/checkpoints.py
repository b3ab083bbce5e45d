"""The checkpoints that a job's attempts told of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry import CheckpointItem
from jobs.history.kept.folder import GoneError
from jobs.history.kept.query import ask
from jobs.models import Attempt, Job


class CheckpointTold(TypedDict):
    """Of one: null is what is not known of it any more. Bytes, seconds, unix seconds."""

    attempt: int
    name: Annotated[str | None, Field(description="what `resume` takes; null where it could not be written")]
    step: int | None
    time: float | None
    num_bytes: int | None
    stall_s: Annotated[float | None, Field(description="what training waited")]
    save_s: float | None
    problem: str


def checkpoints(job: Job) -> list[CheckpointTold]:
    """The newest first. Raises BusyError."""
    return [told for attempt in job.attempts.order_by("-number") for told in _of(attempt)]


def _of(attempt: Attempt) -> Iterator[CheckpointTold]:
    items = _kept(attempt)
    for item in reversed(items):
        yield {
            "attempt": attempt.number,
            "name": item["name"],
            "step": item["step"],
            "time": item["time"],
            "num_bytes": item["num_bytes"],
            "stall_s": item["stall_s"],
            "save_s": item["save_s"],
            "problem": item["problem"],
        }
    if attempt.checkpoint and attempt.checkpoint not in {item["name"] for item in items}:
        unknown = {"step": None, "time": None, "num_bytes": None, "stall_s": None, "save_s": None}
        yield {"attempt": attempt.number, "name": attempt.checkpoint, "problem": "", **unknown}  # type: ignore[typeddict-item]


def _kept(attempt: Attempt) -> list[CheckpointItem]:
    """Of the history; where there is none, of what the attempt left as it ended."""
    try:
        kept: list[CheckpointItem] = ask(attempt.job_id, attempt.number, lambda tables: tables.state["checkpoints"])
    except GoneError:
        left: list[CheckpointItem] = ((attempt.exit or {}).get("summary") or {}).get("checkpoints", [])
        return left
    return kept
