"""The checkpoints that a job's attempts told of, and which of them their run left on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.steps import CheckpointItem
from jobs.models import Attempt, Job
from jobs.planning.saves import most_kept, saves_of
from jobs.runs.history.store.folder import GoneError
from jobs.runs.history.store.query import ask


class CheckpointTold(TypedDict):
    """Of one: null is what is not known of it any more. Bytes, seconds, unix seconds."""

    attempt: int
    name: Annotated[
        str | None,
        Field(description="Checkpoint name to use in `train.resume`. null if the checkpoint could not be written."),
    ]
    step: int | None
    time: float | None
    num_bytes: int | None
    stall_s: Annotated[float | None, Field(description="Seconds that training waited for the checkpoint.")]
    save_s: float | None
    problem: str
    kept: Annotated[
        bool,
        Field(
            description=(
                "True if the checkpoint is on disk. An attempt keeps the newest `train.keep_checkpoints` checkpoints."
            )
        ),
    ]


def checkpoints(job: Job) -> list[CheckpointTold]:
    """The newest first. Raises BusyError."""
    most = most_kept(job)
    return [told for attempt in job.attempts.order_by("-number") for told in _of(attempt, most)]


def _of(attempt: Attempt, most: int) -> Iterator[CheckpointTold]:
    saves = saves_of(attempt)
    if saves.newest and saves.newest not in {item["name"] for item in saves.items}:
        unknown = {"step": None, "time": None, "num_bytes": None, "stall_s": None, "save_s": None}
        yield {"attempt": attempt.number, "name": saves.newest, "problem": "", "kept": True, **unknown}  # type: ignore[typeddict-item]
    for item in reversed(saves.items):
        yield {
            "attempt": attempt.number,
            "name": item["name"],
            "step": item["step"],
            "time": item["time"],
            "num_bytes": item["num_bytes"],
            "stall_s": item["stall_s"],
            "save_s": item["save_s"],
            "problem": item["problem"],
            "kept": item["name"] is not None and saves.complete_after(item["step"]) < most,
        }


def history(attempt: Attempt) -> tuple[list[CheckpointItem], bool]:
    """What it has, and whether nothing of its streams was lost: `jobs.planning.saves.Reader`. Raises BusyError."""
    try:
        return ask(attempt.job_id, attempt.number, lambda it: (it.state["checkpoints"], not it.state["lost"]))
    except GoneError:
        return [], False
