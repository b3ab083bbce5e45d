"""Advice for a job that has ended: what would have been faster where it ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from contracts.telemetry.vocabulary import WARMUP_STEPS
from jobs.models import TERMINAL, Attempt, Job
from jobs.planning.learned import FEWEST_STEPS
from jobs.planning.planners import ask
from jobs.planning.shapes import Advice
from planner.cost.estimate import default_cluster
from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.search.post_run_advice import Hindsight


class NoAdviceError(Exception):
    """The job says too little; `field` is what of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def advice(job: Job) -> Advice:
    """What one other choice would have made of the job's last attempt: `planner.search.post_run_advice`.

    Raises:
        NoAdviceError: it has not ended, was no training run, or was not measured for long enough.
        BusyError: too much is planned at once, or this takes too long.
    """
    kind = get_kind_rules(job.spec)
    if not kind.trains or kind.shares_one_slot:
        raise NoAdviceError("kind", f"`kind` is {job.kind}, but faster layouts are available only for training jobs.")
    if job.status not in TERMINAL:
        raise NoAdviceError(
            "status", f"`status` is {job.status}. Faster layouts are available after the run has ended."
        )
    attempt = job.attempts.filter(number=job.attempt).first()
    summary = (attempt.exit or {}).get("summary") if attempt else None
    measured = (summary or {}).get("measured")
    steps = measured["steps"] if measured else 0
    if attempt is None or summary is None or measured is None or steps < FEWEST_STEPS or measured["step_s"] <= 0:
        text = (
            f"The run has {format_count(steps, 'timed step')} after the first {WARMUP_STEPS} steps, "
            f"but {FEWEST_STEPS} timed steps are needed. "
            "Use a higher `train.steps`."
        )
        raise NoAdviceError("train.steps", text)
    try:
        spec = JobSpec.model_validate(job.spec)
    except ValidationError:
        raise NoAdviceError(
            "spec", "`spec` is from an older version that this version cannot plan. Submit a new job."
        ) from None
    time = job.estimate.get("time", {})
    if "interval" not in time:
        raise NoAdviceError(
            "spec", "The estimate of the job is from an older version and has no margin of error. Submit a new job."
        )
    asked = {
        "step_s": measured["step_s"],
        "busy_s": busy_seconds(summary),
        "parts_s": told_apart(attempt),
        "peak_bytes": max(summary.get("peak_bytes", {}).values(), default=None),
        "predicted_s": {part["name"]: part["seconds"] for part in time["parts"]},
        "sure": time["interval"],
    }
    found: Hindsight = ask("advised", spec, planned_on(job, spec), asked)
    return {**found, "steps": steps, "host": attempt.format_hosts()}


def planned_on(job: Job, spec: JobSpec) -> Cluster:
    """The hardware as the job's submit knew it: what ran later corrects nothing that has ended."""
    try:
        return Cluster.model_validate(job.hardware, strict=False)
    except ValidationError:  # a job of before this was kept, or of another version
        return default_cluster(spec)


def told_apart(attempt: Attempt) -> dict[str, float]:
    """Seconds of a step by part, as the diagnosis measured them; empty where it told no step apart."""
    measured = (attempt.diagnosis or {}).get("measured")
    parts = measured["parts"] if measured else []
    return {part["name"]: part["seconds"] for part in parts if part["kind"] != "hidden"}


def busy_seconds(summary: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by axis that a rank was in collectives, the mean of all ranks that told."""
    ran = summary.get("ran_steps") or summary["steps"]
    ranks = summary["cells"].values()
    total: dict[str, float] = defaultdict(float)
    for cell in (cell for cells in ranks for cell in cells if cell["phase"] == "step"):
        total[cell["axis"]] += cell["busy_s"]
    return {axis: seconds / len(ranks) / ran for axis, seconds in total.items()} if ran else {}
