"""Whether the checkpoint that a spec goes on from can be there, and leaves it a step to do: what the board knows of it,
and no more than that."""

from __future__ import annotations

import re
from typing import Any

from contracts.telemetry.vocabulary import MAX_CHECKPOINTS
from jobs.core.access import get_visible_job
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Job
from jobs.planning.saves import Saves, most_kept, saves_of
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count

NAME = re.compile(r"[^/]+(?:/(?P<attempt>[1-9][0-9]{0,9})(?:/step-(?P<step>[0-9]{8,18}))?)?")


def checkpoint_problems(user: Any, spec: JobSpec) -> list[Problem]:
    """A checkpoint is its job's: who may not see that job is told the same as where there is none. Raises BusyError."""
    resume = spec.train.resume
    if resume is None:
        return []
    job = get_visible_job(user, resume.partition("/")[0])
    words = "the job does not exist, or you cannot see it" if job is None else why_missing(job, resume)
    if words:
        return [Problem("train.resume", f"`train.resume` is {resume!r}, but {words}.")]
    assert job is not None, "a missing job is reported above"
    done, asked = _steps_done(job, resume), spec.train.steps
    if done is None or done < asked:
        return []
    already = f"checkpoint {resume!r} already has {format_count(done, 'step')}"
    text = f"`train.steps` is {asked}, but {already}. Use {done + 1} or more."
    return [Problem("train.steps", text)]


def why_missing(job: Job, name: str) -> str:
    """Why a checkpoint of a job is known not to be there; empty where it may be.

    What a host saved and died before telling may lie there, as may what a job is yet to save.
    """
    if job.engine == EXTERNAL_ENGINE:
        return ""
    named = NAME.fullmatch(name)
    if named is None:
        return "a checkpoint name has the form JOB, JOB/ATTEMPT, or JOB/ATTEMPT/step-00000100"
    wanted, step = named["attempt"], named["step"]
    attempts = job.attempts.order_by("number")
    saves = [saves_of(attempt) for attempt in (attempts.filter(number=int(wanted)) if wanted else attempts)]
    over = job.status in TERMINAL
    if wanted and not saves:
        return f"job {job.id} has no attempt {wanted}" if over else ""
    train = job.spec.get("train", {})
    if train.get("checkpoint_every") == 0 and not any(one.items or one.newest for one in saves):
        return f"job {job.id} saves no checkpoints because its `train.checkpoint_every` is 0"
    if step is not None and "steps" in train and int(step) > train["steps"]:
        return f"job {job.id} has {format_count(train['steps'], 'step')}"
    if step is not None:
        return _why_no_step(saves[0], int(step), most_kept(job))
    none = all(one.final and one.complete_after(-1) == 0 for one in saves)
    return "the job saved no such checkpoint" if over and none else ""


def _steps_done(job: Job, name: str) -> int | None:
    """Of the newest complete one that the name stands for: by attempt, then by step, as a run takes it."""
    named = NAME.fullmatch(name)
    if named is None:
        return None
    if named["step"] is not None:
        return int(named["step"])
    attempts = job.attempts.order_by("-number")
    told = (saves_of(one).newest_step for one in (attempts.filter(number=int(named[1])) if named[1] else attempts))
    return next((step for step in told if step is not None), None)


def _why_no_step(saves: Saves, step: int, most: int) -> str:
    newer = saves.complete_after(step)
    if newer >= most:
        return f"the attempt has {newer} newer checkpoints and keeps only {most} (`train.keep_checkpoints`)"
    told = next((item for item in saves.items if item["step"] == step), None)
    if told is not None:
        return "" if told["name"] else f"writing it failed: {told['problem']}"
    forgotten = len(saves.items) >= MAX_CHECKPOINTS and step < saves.items[0]["step"]
    if forgotten or not (saves.final or (saves.whole and newer)):
        return ""
    steps = ", ".join(str(item["step"]) for item in saves.items[-10:] if item["name"]) or "none"
    return f"the attempt saved no checkpoint at step {step}. The latest checkpoints are at steps {steps}"
