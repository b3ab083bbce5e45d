"""A run beside one process, after the fact: a short copy of it, in the same layout, that one process computes too."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from typing_extensions import TypedDict

from jobs.core.access import may_submit_to, visible_jobs
from jobs.core.kinds import kind_of
from jobs.models import ELSEWHERE, TERMINAL, Job
from jobs.queue.again import changed
from planner.facts.single_process_reference import COMPARED_STEPS, explain_oversized_reference
from planner.facts.spec import JobSpec

LONGEST_NAME = 100  # characters, as a spec has it


class Check(TypedDict):
    """A check of a run, as the run's page shows it. `proof`: a ProofItem, None where it told none."""

    id: str
    name: str
    status: str
    finished: bool
    proof: dict[str, Any] | None


class Offer(TypedDict):
    """Whether a run can be checked by this user, in how many steps, and why it cannot be by anybody."""

    may: bool
    steps: int
    why_not: str


def spec_of(job: Job) -> dict[str, Any]:
    """The job's, in as few steps as are compared, from fresh values: a resumed run cannot be compared."""
    steps = _steps(job)
    train = {
        "steps": steps,
        "warmup_steps": min(job.spec["train"].get("warmup_steps", steps), steps),
        "verify": "on",
        "resume": None,
        "checkpoint_every": 0,
        "eval_every": 0,
    }
    name = f"reference check of {job.name}"[:LONGEST_NAME]
    return changed(job.spec, {"name": name, "train": train, "retry": None, "after": None, "after_failed": None})


def offer(user: Any, job: Job) -> Offer | None:
    """None where there is nothing to check: it trains nothing, or we did not launch it."""
    if "proof" not in kind_of(job.spec).panels or job.engine == ELSEWHERE:
        return None
    return {"may": may_submit_to(user, job.project), "steps": _steps(job), "why_not": _why_not(job)}


def newest(user: Any, job: Job) -> Check | None:
    """The newest check of the job that the user may see."""
    found = visible_jobs(user).filter(check_of=job).order_by("-created").first()
    return None if found is None else _told(found)


def _told(check: Job) -> Check:
    attempt = check.attempts.filter(number=check.attempt).first()
    summary = ((attempt.exit if attempt else None) or {}).get("summary") or {}
    return {
        "id": check.id,
        "name": check.name,
        "status": check.status,
        "finished": check.status in TERMINAL,
        "proof": summary.get("proof"),
    }


def _steps(job: Job) -> int:
    return min(COMPARED_STEPS, int(job.spec["train"]["steps"]))


def _why_not(job: Job) -> str:
    try:
        return explain_oversized_reference(JobSpec.model_validate(spec_of(job)))
    except ValidationError:
        return "The spec is from another version of Meshboard, so this version cannot run the check."
