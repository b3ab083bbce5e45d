"""Checkpoints that the board knows of, and problems of the checkpoint that a spec resumes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from contracts.telemetry.items import MAX_CHECKPOINTS, CheckpointItem
from jobs.core.access import get_visible_job
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Attempt, Job
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count

NAME = re.compile(r"[^/]+(?:/(?P<attempt>[1-9][0-9]{0,9})(?:/step-(?P<step>[0-9]{8,18}))?)?")

# Returns the checkpoints in the streams of an attempt, and whether no telemetry was lost.
Reader = Callable[[Attempt], tuple[list[CheckpointItem], bool]]
_readers: list[Reader] = []


def register_reader(reader: Reader) -> None:
    """Add a reader of stored telemetry. The history registers itself, because planning cannot import it."""
    _readers.append(reader)


class CheckpointLog(NamedTuple):
    """Checkpoints of an attempt, oldest first.

    Args:
        newest: Name of the newest complete checkpoint in the heartbeats, or "".
        is_complete: No checkpoint is missing before the last item.
        is_final: No checkpoint is missing after the last item either.
    """

    items: list[CheckpointItem]
    newest: str
    is_complete: bool
    is_final: bool

    @property
    def newest_step(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self._get_steps(), default=None)

    def count_after(self, step: int) -> int:
        """Return the number of complete checkpoints after a step."""
        return sum(1 for one in self._get_steps() if one > step)

    def _get_steps(self) -> set[int]:
        steps = {item["step"] for item in self.items if item["name"] is not None}
        return steps | ({parse_step(self.newest)} if self.newest else set())


def read_checkpoint_log(attempt: Attempt) -> CheckpointLog:
    """Return the checkpoints of an attempt. Raises BusyError if too many histories are being read."""
    report = attempt.exit or {}
    summary = report.get("summary")
    stored = [reader(attempt) for reader in _readers]
    reported: list[CheckpointItem] = (summary or {}).get("checkpoints", [])
    items = {item["step"]: item for item in [*(item for found, _ in stored for item in found), *reported]}
    has_newest = not attempt.checkpoint or parse_step(attempt.checkpoint) in items
    return CheckpointLog(
        [items[step] for step in sorted(items)],
        attempt.checkpoint,
        is_complete=has_newest and (summary is not None or any(complete for _, complete in stored)),
        is_final=has_newest and summary is not None and report.get("outcome") == "succeeded",
    )


def get_max_checkpoints(job: Job) -> int:
    """Return the number of checkpoints that an attempt keeps."""
    maximum: int = job.spec.get("train", {}).get("keep_checkpoints", MAX_CHECKPOINTS)
    return maximum


def parse_step(name: str) -> int:
    """Return the step of a checkpoint name, which ends in "/step-N"."""
    return int(name.rpartition("/step-")[2])


def find_checkpoint_problems(user: Any, spec: JobSpec) -> list[Problem]:
    """Return why a spec cannot resume from its checkpoint, or has no step left to run. Raises BusyError.

    A job that the user cannot see is reported like a missing job.
    """
    resume, num_steps = spec.train.resume, spec.train.steps
    if resume is None:
        return []
    job = get_visible_job(user, resume.partition("/")[0])
    reason = "the job does not exist, or you cannot see it" if job is None else explain_missing_checkpoint(job, resume)
    if job is None or reason:
        return [Problem("train.resume", f"`train.resume` is {resume!r}, but {reason}.")]
    done = _get_num_steps(job, resume)
    if done is None or done < num_steps:
        return []
    message = f"checkpoint {resume!r} already has {format_count(done, 'step')}. Use {done + 1} or more."
    return [Problem("train.steps", f"`train.steps` is {num_steps}, but {message}")]


def explain_missing_checkpoint(job: Job, name: str) -> str:
    """Return why a checkpoint cannot exist, or "" if it can.

    A host can store a checkpoint that it did not report, and a job can still save one.
    """
    if job.engine == EXTERNAL_ENGINE:
        return ""
    match = NAME.fullmatch(name)
    if match is None:
        return "a checkpoint name has the form JOB, JOB/ATTEMPT, or JOB/ATTEMPT/step-00000100"
    number, step = match["attempt"], match["step"]
    attempts = job.attempts.order_by("number")
    logs = [read_checkpoint_log(one) for one in (attempts.filter(number=int(number)) if number else attempts)]
    has_ended = job.status in TERMINAL
    if number and not logs:
        return f"job {job.id} has no attempt {number}" if has_ended else ""
    train = job.spec.get("train", {})
    if train.get("checkpoint_every") == 0 and not any(log.items or log.newest for log in logs):
        return f"job {job.id} saves no checkpoints because its `train.checkpoint_every` is 0"
    if step is not None and "steps" in train and int(step) > train["steps"]:
        return f"job {job.id} has {format_count(train['steps'], 'step')}"
    if step is not None:
        return _explain_missing_step(logs[0], int(step), get_max_checkpoints(job))
    is_empty = all(log.is_final and log.count_after(-1) == 0 for log in logs)
    return "the job saved no such checkpoint" if has_ended and is_empty else ""


def _explain_missing_step(log: CheckpointLog, step: int, max_checkpoints: int) -> str:
    num_newer = log.count_after(step)
    if num_newer >= max_checkpoints:
        limit = f"keeps only {max_checkpoints} (`train.keep_checkpoints`)"
        return f"the attempt has {num_newer} newer checkpoints and {limit}"
    item = next((item for item in log.items if item["step"] == step), None)
    if item is not None:
        return "" if item["name"] else f"writing it failed: {item['problem']}"
    may_be_deleted = len(log.items) >= MAX_CHECKPOINTS and step < log.items[0]["step"]
    if may_be_deleted or not (log.is_final or (log.is_complete and num_newer)):
        return ""
    steps = ", ".join(str(item["step"]) for item in log.items[-10:] if item["name"]) or "none"
    return f"the attempt saved no checkpoint at step {step}. The latest checkpoints are at steps {steps}"


def _get_num_steps(job: Job, name: str) -> int | None:
    """Return the steps in the newest complete checkpoint that a name selects, as a run selects it."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    if match["step"] is not None:
        return int(match["step"])
    attempts = job.attempts.order_by("-number")
    if match["attempt"]:
        attempts = attempts.filter(number=int(match["attempt"]))
    steps = (read_checkpoint_log(attempt).newest_step for attempt in attempts)
    return next((step for step in steps if step is not None), None)
