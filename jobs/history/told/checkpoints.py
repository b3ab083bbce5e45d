"""The checkpoints that a job's attempts told of, and which of them their run left on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

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
    kept: Annotated[bool, Field(description="one of the newest train.keep_checkpoints of its attempt, which stay")]


class Saves(NamedTuple):
    """What is known of an attempt's saves, the newest last.

    `whole`: none is missing between those that are told of. `final`: nor behind the last: no later one can be there.
    """

    items: list[CheckpointItem]
    newest: str
    whole: bool
    final: bool

    def complete_after(self, step: int) -> int:
        """How many newer ones are complete."""
        steps = {item["step"] for item in self.items if item["name"] is not None}
        return sum(1 for one in steps | ({step_of(self.newest)} if self.newest else set()) if one > step)


def checkpoints(job: Job) -> list[CheckpointTold]:
    """The newest first. Raises BusyError."""
    most = most_kept(job)
    return [told for attempt in job.attempts.order_by("-number") for told in _of(attempt, most)]


def most_kept(job: Job) -> int:
    """How many of an attempt stay."""
    most: int = job.spec.get("train", {}).get("keep_checkpoints", 0)
    return most


def step_of(name: str) -> int:
    """Of what ends in /step-n."""
    return int(name.rpartition("/step-")[2])


def saves_of(attempt: Attempt) -> Saves:
    """Of the history and of what the attempt left as it ended. Raises BusyError."""
    ended = attempt.exit or {}
    summary = ended.get("summary")
    left: list[CheckpointItem] = (summary or {}).get("checkpoints", [])
    kept, whole = _history(attempt)
    items = {item["step"]: item for item in [*kept, *left]}
    has_newest = not attempt.checkpoint or step_of(attempt.checkpoint) in items
    return Saves(
        [items[step] for step in sorted(items)],
        attempt.checkpoint,
        whole=has_newest and (whole or summary is not None),
        final=has_newest and summary is not None and ended.get("outcome") == "succeeded",
    )


def _of(attempt: Attempt, most: int) -> Iterator[CheckpointTold]:
    saves = saves_of(attempt)
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
    if saves.newest and saves.newest not in {item["name"] for item in saves.items}:
        unknown = {"step": None, "time": None, "num_bytes": None, "stall_s": None, "save_s": None}
        yield {"attempt": attempt.number, "name": saves.newest, "problem": "", "kept": True, **unknown}  # type: ignore[typeddict-item]


def _history(attempt: Attempt) -> tuple[list[CheckpointItem], bool]:
    """What it has, and whether nothing of its streams was lost."""
    try:
        return ask(attempt.job_id, attempt.number, lambda it: (it.state["checkpoints"], not it.state["lost"]))
    except GoneError:
        return [], False
