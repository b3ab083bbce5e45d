"""Queue jobs that are derived from another job: changed copies, and reference checks.

A reference check repeats the first steps of a run in its layout and compares them with a single process.
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

MAX_NAME_CHARACTERS = 100  # as in `JobSpec`


class ResumeRequest(StrictModel):
    """The checkpoint to resume from, and the changes to the spec."""

    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        pattern=NO_NUL,
        description="Name of the checkpoint to resume from. Default: the latest checkpoint.",
    )
    change: dict[str, Any] = Field(default={}, description="Changes to the spec, as a JSON merge patch (RFC 7396).")


class ExternalJobError(Exception):
    """A run that started outside Meshboard cannot be copied."""


def copy_job(
    user: User, job: Job, change: Any, *, key: str | None = None, request_body: object = None
) -> tuple[Job, StateChange | None]:
    """Queue a copy of a job with a merge patch (RFC 7396) applied to its spec. See `actions.submit`.

    Raises:
        ExternalJobError: The job has no spec that Meshboard can launch.
        SpecError, BusyError, KeyReusedError: As in `actions.submit`.
    """
    if job.engine == EXTERNAL_ENGINE:
        raise ExternalJobError("The job runs outside Meshboard. Start the job again where it ran.")
    if not isinstance(change, Mapping):
        text = "The request body is not a JSON object. Send the changed spec fields as a JSON object."
        raise SpecError([Problem("request", text)])
    return actions.submit(user, apply_merge_patch(job.spec, change), key=key, request_body=request_body)


def get_newest_checkpoint(job: Job) -> str | None:
    """Return the name of the latest checkpoint from all attempts."""
    attempts = Attempt.objects.filter(job=job).exclude(checkpoint="").order_by("-number")
    return attempts.values_list("checkpoint", flat=True).first()


def apply_merge_patch(spec: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a merge patch (RFC 7396) to a spec.

    A new preset replaces the whole model. A default warm-up that exceeds the new number of steps is dropped.
    """
    model = change.get("model")
    if isinstance(model, Mapping) and "preset" in model:
        spec = {**spec, "model": {}}  # otherwise, the old sizes would override the preset
    merged = _merge(spec, change)
    assert isinstance(merged, dict), "the merge of two mappings is a mapping"
    before, after = spec.get("train"), change.get("train")
    if isinstance(before, Mapping) and isinstance(after, Mapping) and "warmup_steps" not in after:
        steps, warmup = after.get("steps"), before.get("warmup_steps")
        is_default = "steps" in before and warmup == get_default_warmup(before["steps"])
        if is_default and type(steps) is int and steps < int(warmup or 0):
            del merged["train"]["warmup_steps"]
    return merged


def _merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged


class Check(TypedDict):
    """A reference check on the page of its run. `proof`: a ProofItem, or None if the check reported none."""

    id: str
    name: str
    status: str
    finished: bool
    proof: dict[str, Any] | None


class CheckOffer(TypedDict):
    """The number of steps of a reference check, whether the user may submit it, and why it is impossible."""

    may: bool
    steps: int
    why_not: str


def build_check_spec(job: Job) -> dict[str, Any]:
    """Build the spec of a reference check. It starts from new weights, because resumed runs cannot be compared."""
    steps = _get_check_steps(job)
    train = {
        "steps": steps,
        "warmup_steps": min(job.spec["train"].get("warmup_steps", steps), steps),
        "verify": "on",
        "resume": None,
        "checkpoint_every": 0,
        "eval_every": 0,
    }
    name = f"reference check of {job.name}"[:MAX_NAME_CHARACTERS]
    change = {"name": name, "train": train, "retry": None, "after": None, "after_failed": None}
    return apply_merge_patch(job.spec, change)


def describe_check_offer(user: Any, job: Job) -> CheckOffer | None:
    """Describe the possible reference check of a run, or return None for jobs without training by Meshboard."""
    if "proof" not in get_kind(job.spec).panels or job.engine == EXTERNAL_ENGINE:
        return None
    try:
        why_not = explain_oversized_reference(JobSpec.model_validate(build_check_spec(job)))
    except ValidationError:
        why_not = "The spec is from another version of Meshboard, so this version cannot run the check."
    return {"may": may_submit_to(user, job.project), "steps": _get_check_steps(job), "why_not": why_not}


def get_newest_check(user: Any, job: Job) -> Check | None:
    """Return the newest reference check of a job that the user may see."""
    check = get_visible_jobs(user).filter(check_of=job).order_by("-created").first()
    if check is None:
        return None
    attempt = check.attempts.filter(number=check.attempt).first()
    summary = ((attempt.exit if attempt else None) or {}).get("summary") or {}
    return {
        "id": check.id,
        "name": check.name,
        "status": check.status,
        "finished": check.status in TERMINAL,
        "proof": summary.get("proof"),
    }


def _get_check_steps(job: Job) -> int:
    return min(COMPARED_STEPS, int(job.spec["train"]["steps"]))
