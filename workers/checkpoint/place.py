"""Where a training job's checkpoints lie, for whoever asks before anything is imported that saves them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from planner.facts.spec import JobSpec
from workers.trainer.errors import UserError


class Place(NamedTuple):
    """Where a job's checkpoints lie: ROOT/job/attempt/step-n.

    `expected`: the newest that an earlier attempt told of, and on which host it was written. `loan`: where rank 0 hears
    how that host lends it, where none of this attempt has it. `host`: what this one is called.
    """

    root: Path
    job: str
    attempt: int
    expected: str = ""
    expected_on: str = ""
    loan: Path | None = None
    host: str = ""


def place_of(
    spec: JobSpec,
    root: Path | None,
    job: str,
    attempt: int,
    expected: str = "",
    expected_on: str = "",
    loan: Path | None = None,
    host: str = "",
) -> Place | None:
    """Where a job's checkpoints lie, None when it neither saves nor resumes.

    Raises:
        UserError: when it does and there is no root.
    """
    if not spec.train.checkpoint_every and spec.train.resume is None:
        return None
    if root is None:
        field = "checkpoint_every" if spec.train.checkpoint_every else "resume"
        raise UserError(f"`train.{field}` needs --checkpoint-root, the directory of the checkpoints.")
    return Place(root, job, attempt, expected, expected_on, loan, host)
