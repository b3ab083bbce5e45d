"""A job like another: its spec with some of it changed, as a new job of whoever asks.

A run beside one process, after the fact: a short copy of it, in the same layout, that one process computes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib.auth.models import User
from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from jobs.core.access import get_visible_jobs, may_submit_to
from jobs.core.kinds import get_kind
from jobs.models import EXTERNAL_ENGINE, TERMINAL, Attempt, Job, StateChange
from jobs.queue import actions
from planner.facts.single_process_reference import COMPARED_STEPS, explain_oversized_reference
from planner.facts.spec import JobSpec, get_default_warmup
from planner.facts.validation import NO_NUL, Problem, SpecError, StrictModel


class ResumeRequest(StrictModel):
    """What to go on from, and what is to be other than in the job's spec."""

    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        pattern=NO_NUL,
        description="Name of the checkpoint to resume from. Default: the latest checkpoint.",
    )
    change: dict[str, Any] = Field(default={}, description="Changes to the spec, as a JSON merge patch (RFC 7396).")


class ExternalJobError(Exception):
    """Nothing can be made of it."""


def copy_job(
    user: User, job: Job, change: Any, *, key: str | None = None, request_body: object = None
) -> tuple[Job, StateChange | None]:
    """Queue a job with the spec of another, changed by a merge patch (RFC 7396); as `actions.submit`.

    Raises:
        NotAgainError: it was launched elsewhere: there is no spec to launch.
        SpecError, BusyError, KeyReusedError: as `actions.submit`.
    """
    if job.engine == EXTERNAL_ENGINE:
        raise ExternalJobError("The job runs outside Meshboard. Start the job again where it ran.")
    if not isinstance(change, Mapping):
        raise SpecError(
            [
                Problem(
                    "request", "The request body is not a JSON object. Send the changed spec fields as a JSON object."
                )
            ]
        )
    return actions.submit(user, apply_merge_patch(job.spec, change), key=key, request_body=request_body)


def get_newest_checkpoint(job: Job) -> str | None:
    """The newest that any attempt of the job told of, by its name."""
    told = Attempt.objects.filter(job=job).exclude(checkpoint="").order_by("-number")
    return told.values_list("checkpoint", flat=True).first()


def apply_merge_patch(spec: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A spec changed by a merge patch (RFC 7396), in which a preset is the whole model, and fewer steps cut a warm-up
    that nobody chose."""
    model = change.get("model")
    if isinstance(model, Mapping) and "preset" in model:
        # The sizes of the job's own model beside another preset would win over it.
        spec = {**spec, "model": {}}
    merged = _merged(spec, change)
    assert isinstance(merged, dict), "the merge of two mappings is a mapping"
    if _outlasts_unchosen(spec.get("train"), change.get("train")):
        del merged["train"]["warmup_steps"]
    return merged


def _outlasts_unchosen(before: Any, change: Any) -> bool:
    """Whether the warm-up is the usual one of the steps before, and longer than those asked for."""
    if not isinstance(before, Mapping) or not isinstance(change, Mapping) or "warmup_steps" in change:
        return False
    steps, warmup = change.get("steps"), before.get("warmup_steps")
    return "steps" in before and warmup == get_default_warmup(before["steps"]) and type(steps) is int and steps < warmup


def _merged(target: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    kept = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = _merged(kept.get(name), value)
    return kept


LONGEST_NAME = 100  # characters, as a spec has it


class Check(TypedDict):
    """A check of a run, as the run's page shows it. `proof`: a ProofItem, None where it told none."""

    id: str
    name: str
    status: str
    finished: bool
    proof: dict[str, Any] | None


class CheckOffer(TypedDict):
    """Whether a run can be checked by this user, in how many steps, and why it cannot be by anybody."""

    may: bool
    steps: int
    why_not: str


def build_check_spec(job: Job) -> dict[str, Any]:
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
    return apply_merge_patch(
        job.spec, {"name": name, "train": train, "retry": None, "after": None, "after_failed": None}
    )


def describe_check_offer(user: Any, job: Job) -> CheckOffer | None:
    """None where there is nothing to check: it trains nothing, or we did not launch it."""
    if "proof" not in get_kind(job.spec).panels or job.engine == EXTERNAL_ENGINE:
        return None
    return {"may": may_submit_to(user, job.project), "steps": _steps(job), "why_not": _why_not(job)}


def get_newest_check(user: Any, job: Job) -> Check | None:
    """The newest check of the job that the user may see."""
    found = get_visible_jobs(user).filter(check_of=job).order_by("-created").first()
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
        return explain_oversized_reference(JobSpec.model_validate(build_check_spec(job)))
    except ValidationError:
        return "The spec is from another version of Meshboard, so this version cannot run the check."
