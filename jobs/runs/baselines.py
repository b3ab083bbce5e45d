"""Store baselines, the runs with which the gate compares others, by project and branch.

The client computes the same facts (`meshboard.gate.measures`) and compares specs by the same rule
(`meshboard.gate.specs`). A test compares both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from pydantic import Field, ValidationError
from typing_extensions import TypedDict

from contracts.telemetry.items import SCRIPT_SETUP_STEPS
from jobs.core.access import find_project, get_role, get_visible_job
from jobs.core.audit import record
from jobs.core.errors import NotFoundError
from jobs.core.job_details import Timestamp
from jobs.models import DEFAULT_PROJECT, BaselineRun, Project, Role, Status, describe_status
from jobs.runs.history.queries.comparison import find_differences
from planner.facts.parse_spec import SpecDict
from planner.facts.resources import SoftwareSpec
from planner.facts.spec import JobSpec
from planner.facts.validation import JobId, Problem, SpecError, StrictModel

MEASURED_FIELDS = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# Fields that do not change the expected figures. Runs with different seeds measure the noise.
IGNORED_FIELDS = {
    *("model.preset", "train.seed"),
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "stack")),
    *(f"resources.software.{name}" for name in SoftwareSpec.model_fields),
    *(f"resources.slurm.{name}" for name in ("partition", "account", "qos", "time_limit", "constraint", "exclude")),
}
MAX_NAMED_DIFFERENCES = 4
MAX_VALUE_LENGTH = 60


def select_measured_fields(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec that affect the results."""
    return {name: spec[name] for name in MEASURED_FIELDS if name in spec}


def explain_difference(run_spec: Mapping[str, Any] | None, newest_spec: Mapping[str, Any] | None) -> str:
    """Return why a run is not comparable with the newest run, "" if it is. None: the spec is not stored."""
    if run_spec is None or newest_spec is None:
        return f"the spec of {'this job' if run_spec is None else 'the newest job'} is not stored"
    differences = [
        field
        for field in find_differences([_add_defaults(run_spec), _add_defaults(newest_spec)])
        if field["field"] not in IGNORED_FIELDS
    ]
    named = [
        f"{field['field']} {', not '.join(map(_format_value, field['values']))}"
        for field in differences[:MAX_NAMED_DIFFERENCES]
    ]
    more = len(differences) - MAX_NAMED_DIFFERENCES
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _add_defaults(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults of newer fields, with which the run ran."""
    try:
        return select_measured_fields(JobSpec.model_validate(spec).model_dump(mode="json"))
    except ValidationError:  # stored by an older version
        return spec


def _format_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 1]}…"


MAX_TRAFFIC_ROWS = 2000  # axes and collectives per run, because a script names its own groups


class NoFactsError(ValueError):
    """The run cannot be a baseline."""


class CollectiveTraffic(TypedDict):
    """Hold the payload bytes and calls per step over all ranks."""

    axis: str
    op: str
    bytes: float
    calls: float


class StepLoss(TypedDict):
    """Hold the training loss after a step."""

    step: int
    loss: float


class PlanDifference(TypedDict):
    """Hold the absolute differences between measured and predicted traffic, summed over ranks and axes."""

    bytes: int
    calls: int


class RunMeasurements(TypedDict):
    """Hold the figures of a run. Unknown figures are null."""

    steps: Annotated[
        int,
        Field(description="Number of steps in the means of bytes and calls, without the first two steps of a script."),
    ]
    step_s: Annotated[float | None, Field(description="Median step time of rank 0, without the first three steps.")]
    tokens_per_s: float | None
    peak_bytes: Annotated[int | None, Field(description="Peak memory of the rank with the highest peak.")]
    losses: list[StepLoss]
    last_step: NotRequired[
        Annotated[int, Field(description="Number of the last step. Absent for runs of older versions.")]
    ]
    sent: list[CollectiveTraffic]
    no_sent: NotRequired[Annotated[str, Field(description="Reason why `sent` is empty.")]]
    no_peak: NotRequired[Annotated[str, Field(description="Reason why `peak_bytes` is null.")]]
    apart: Annotated[
        PlanDifference | None,
        Field(
            description="Difference between measured and predicted traffic. null if a rank did not compare the traffic."
        ),
    ]


def compute_facts(exit_report: Mapping[str, Any] | None, ranks: int) -> RunMeasurements:
    """Return the figures in the exit report of a successful attempt. Raise NoFactsError if it has none."""
    summary = (exit_report or {}).get("summary")
    if not summary:
        raise NoFactsError("The ranks of the job reported no summary.")
    steps = summary.get("ran_steps", summary.get("steps", 0))
    if not steps:
        if summary.get("steps"):
            raise NoFactsError(f"The script completed no step after its {SCRIPT_SETUP_STEPS} set-up steps.")
        raise NoFactsError("The job completed no step.")
    left_out = summary.get("cells_left_out", 0)
    sent = [] if left_out else sum_traffic(summary.get("cells") or {}, steps)
    if len(sent) > MAX_TRAFFIC_ROWS:
        rows = f"{len(sent):,} combinations of axis and collective"
        raise NoFactsError(f"The job has {rows}. The maximum is {MAX_TRAFFIC_ROWS:,}.")
    peaks = summary.get("peak_bytes") or {}
    some_peaks = 0 < len(peaks) < ranks
    figures: RunMeasurements = {
        "steps": steps,
        "step_s": (summary.get("measured") or {}).get("step_s"),
        "tokens_per_s": summary.get("tokens_per_s"),
        "peak_bytes": None if some_peaks else max(peaks.values(), default=None),
        "last_step": summary.get("steps", steps),
        "losses": [{"step": point["step"], "loss": point["loss"]} for point in summary.get("losses") or []],
        "sent": sent,
        "apart": _sum_differences(summary.get("verdict") or {}, ranks),
    }
    if left_out:
        figures["no_sent"] = f"only {max(0, ranks - left_out)} of {ranks} ranks have stored traffic"
    if some_peaks:
        figures["no_peak"] = f"only {len(peaks)} of {ranks} ranks have a stored peak"
    return figures


def sum_traffic(cells: Mapping[str, list[dict[str, Any]]], steps: int) -> list[CollectiveTraffic]:
    """Return bytes and calls per step over all ranks, by axis and collective. `cells` are final counters by rank."""
    payload, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cell in (cell for rank_cells in cells.values() for cell in rank_cells if cell["phase"] == "step"):
        payload[cell["axis"], cell["op"]] += cell["payload_bytes"]
        calls[cell["axis"], cell["op"]] += cell["count"]
    return [
        {"axis": axis, "op": op, "bytes": payload[axis, op] / steps, "calls": calls[axis, op] / steps}
        for axis, op in sorted(payload)
    ]


def _sum_differences(verdicts: Mapping[str, list[dict[str, Any]]], ranks: int) -> PlanDifference | None:
    rows = [row for rank_rows in verdicts.values() for row in rank_rows]
    if len(verdicts) < ranks:
        return None
    return {
        "bytes": sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        "calls": sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
    }


MAX_RUNS_PER_BRANCH = 20
MAX_BRANCHES = 200  # per project


class BaselineRequest(StrictModel):
    """Add a run to the baseline of a branch."""

    job: JobId = Field(description="Id of a succeeded job of the project.")


class BranchRun(TypedDict):
    """Describe a run of a baseline and who added it."""

    job: str
    name: str
    by: str
    at: Timestamp


class BaselineRunDetail(BranchRun):
    """Describe a run with which others are compared, and its figures."""

    facts: RunMeasurements


class ExcludedRun(BranchRun):
    """Describe a run of the branch that is not comparable with the newest run."""

    why: Annotated[str, Field(description="Spec fields in which this job differs from the newest job.")]


class Baseline(TypedDict):
    """Describe the baseline of a branch. Runs are sorted from newest to oldest."""

    project: str
    branch: str
    spec: Annotated[
        SpecDict | None,
        Field(description="Spec fields of the newest job that affect the results. null if they are not stored."),
    ]
    runs: list[BaselineRunDetail]
    left_aside: Annotated[
        list[ExcludedRun], Field(description="Runs with a different spec, which the mean of `runs` excludes.")
    ]


class BranchBrief(TypedDict):
    """Describe a branch in a list by its number of runs and the newest run."""

    branch: str
    runs: int
    job: str
    name: str
    by: str
    at: Timestamp


class NotUsableError(Exception):
    """The job cannot be a baseline in its state."""


def list_branches(user: User, project: str) -> list[BranchBrief]:
    """Return the branches with baselines, by name. Raises NotFoundError."""
    by_branch: dict[str, BranchBrief] = {}
    for run in _query_visible_runs(user, project).defer("facts", "spec").order_by("branch", "-at", "-id"):
        if run.branch in by_branch:
            by_branch[run.branch]["runs"] += 1
            continue
        by_branch[run.branch] = {"branch": run.branch, "runs": 1, **_serialize_run(run)}
    return list(by_branch.values())


def get_baseline(user: User, project: str, branch: str) -> Baseline:
    """Return the baseline of a branch. Raises NotFoundError."""
    runs = list(_query_visible_runs(user, project).filter(branch=branch))
    if not runs:
        raise NotFoundError("baseline")
    explained = [(run, "" if run is runs[0] else explain_difference(run.spec, runs[0].spec)) for run in runs]
    return {
        "project": project,
        "branch": branch,
        "spec": runs[0].spec,
        "runs": [{**_serialize_run(run), "facts": run.facts} for run, reason in explained if not reason],
        "left_aside": [{**_serialize_run(run), "why": reason} for run, reason in explained if reason],
    }


def add_run(user: User, project: str, branch: str, job_id: str) -> Baseline:
    """Add a job as the newest run of a branch, and delete the oldest runs above the limit.

    Raises:
        SpecError: The job does not exist or is in another project, or the project has too many branches.
        NotUsableError: The job did not succeed or reported nothing.
        PermissionDenied, NotFoundError: As for other changes of a project.
    """
    _check_may_set(user, project)
    job = get_visible_job(user, job_id)
    if job is None:
        raise SpecError([Problem("job", "The job does not exist, or you cannot see it.")])
    if job.project != project:
        raise SpecError([Problem("job", f"The job is in project {job.project}, not in {project}.")])
    if job.status != Status.SUCCEEDED:
        raise NotUsableError(f"The job {describe_status(job.status)}. Use a job that succeeded.")
    try:
        figures = compute_facts(job.attempts.get(number=job.attempt).exit, job.world_size)
    except NoFactsError as error:
        raise NotUsableError(str(error)) from None
    runs = _query_runs(user, project)
    with transaction.atomic():
        list(Project.objects.select_for_update(no_key=True).filter(name=project))  # serialize concurrent requests
        others = runs.exclude(branch=branch).values("branch").distinct().count()
        if others >= MAX_BRANCHES:
            message = f"The project has {others} baselines, and the maximum is {MAX_BRANCHES}. Delete one first."
            raise SpecError([Problem("branch", message)])
        BaselineRun.objects.update_or_create(
            {"name": job.name, "facts": figures, "spec": select_measured_fields(job.spec), "by": user.get_username()},
            project=project,
            branch=branch,
            owner=_get_owner(user, project),
            job=job.id,
        )
        newest = runs.filter(branch=branch).values_list("pk", flat=True)[:MAX_RUNS_PER_BRANCH]
        runs.filter(branch=branch).exclude(pk__in=list(newest)).delete()
        record(user.get_username(), "set baseline", "baseline", f"{project}/{branch}", after=job.id)
    return get_baseline(user, project, branch)


def delete_baseline(user: User, project: str, branch: str) -> None:
    """Delete the baseline of a branch. Raises PermissionDenied, NotFoundError."""
    _check_may_set(user, project)
    with transaction.atomic():
        num_deleted, _ = _query_visible_runs(user, project).filter(branch=branch).delete()
        if not num_deleted:
            raise NotFoundError("baseline")
        record(user.get_username(), "forget baseline", "baseline", f"{project}/{branch}", before=num_deleted)


def _serialize_run(run: BaselineRun) -> BranchRun:
    return {"job": run.job, "name": run.name, "by": run.by, "at": run.at.isoformat()}


def _get_owner(user: User, project: str) -> User | None:
    return user if project == DEFAULT_PROJECT else None


def _query_runs(user: User, project: str) -> QuerySet[BaselineRun]:
    return BaselineRun.objects.filter(project=project, owner=_get_owner(user, project))


def _query_visible_runs(user: User, project: str) -> QuerySet[BaselineRun]:
    """Return visible runs. Raises NotFoundError if the project does not exist or the user is not a member."""
    if project != DEFAULT_PROJECT:  # all users are members, even if it has no row
        find_project(user, project)
    return _query_runs(user, project)


def _check_may_set(user: User, project: str) -> None:
    """Check that the user may change baselines: all users in `default`, operators in other projects."""
    role = get_role(user, project)
    if role is None:
        raise NotFoundError("project")
    if project != DEFAULT_PROJECT and role < Role.OPERATOR:
        raise PermissionDenied(f"You need the `operator` role in project {project}. Your role is {role.label}.")
