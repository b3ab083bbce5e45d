"""Predict the step of a user's script from `script.plan`, and compare the prediction with the measurement."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.errors import NotFoundError
from jobs.models import Job
from jobs.planning.hosts import list_hosts, predict_cluster
from jobs.planning.planner_processes import run_task
from jobs.runs.history.store.folder import NoHistoryError
from jobs.runs.history.store.query import query_history
from jobs.runs.history.store.schema import HistoryState
from planner.cost.estimate import Estimate, find_size_problems
from planner.facts.inferred_layout import CannotInferError, GroupTraffic, InferredLayout, infer_layout
from planner.facts.kinds import make_planned_spec
from planner.facts.model_shapes import count_parameters
from planner.facts.parse_spec import LayoutDict
from planner.facts.spec import JobSpec, Layout
from planner.facts.spec_rules import find_problems

NO_STEPS = "The script has not ended a step yet. Set `script.plan.layout` for a prediction before the run."


class PredictedValue(TypedDict):
    """One predicted value, with its measurement."""

    name: Annotated[str, Field(description="`step_time`, `peak_memory`, or `traffic`.")]
    axis: Annotated[str | None, Field(description="Axis of `traffic`. `other`: groups that belong to no axis.")]
    unit: Annotated[str, Field(description="`s`, or `B`. Traffic is the mean payload of the ranks per step.")]
    predicted: float | None
    share: Annotated[
        float | None,
        Field(description="Relative margin of error. Above 1, the value is correct within a factor of 1 + `share`."),
    ]
    measured: float | None
    difference: Annotated[
        float | None, Field(description="Measured minus predicted, relative to predicted. null if one is unknown.")
    ]


class ScriptPrediction(TypedDict):
    """Prediction of a script, compared with its run."""

    inferred: Annotated[bool, Field(description="True if the layout is inferred from the process groups of the run.")]
    layout: Annotated[LayoutDict | None, Field(description="Layout of the prediction. null if it is unknown.")]
    assumptions: Annotated[list[str], Field(description="Assumptions that the traffic does not prove.")]
    problems: Annotated[list[str], Field(description="Reasons for a missing prediction. Empty with a prediction.")]
    hardware: Annotated[str | None, Field(description="Accelerator of the prediction.")]
    values: list[PredictedValue]


class _Run(NamedTuple):
    """Measured values of the last attempt. `traffic`: means of the ranks per step, without groups of one rank."""

    step_s: float | None
    peak_bytes: int | None
    traffic: list[GroupTraffic]
    has_steps: bool


def predict_script(job: Job) -> ScriptPrediction:
    """Return the prediction of a script.

    Raises:
        NotFoundError: The job has no `script.plan`.
        BusyError: The planner or the history is busy.
    """
    spec = JobSpec.model_validate(job.spec)
    if spec.script is None or spec.script.plan is None:
        raise NotFoundError("prediction", "The job has no `script.plan`, so Meshboard cannot predict its step.")
    run, fixed = _read_run(job), spec.script.plan.layout
    num_parameters = count_parameters(spec.script.plan.model)
    answer: ScriptPrediction = {
        "inferred": fixed is None,
        "layout": None,
        "assumptions": [],
        "problems": [],
        "hardware": None,
        "values": [],
    }
    if fixed is None and not run.has_steps:
        return {**answer, "problems": [NO_STEPS]}
    found: InferredLayout | None
    try:
        found = infer_layout(spec.layout.world_size, run.traffic, num_parameters)
    except CannotInferError as error:
        if fixed is None:
            return {**answer, "problems": [str(error)]}
        found = None
    layout = fixed or Layout(**(found.fields if found else {}))
    answer |= {"layout": layout.model_dump(), "assumptions": list(found.assumptions) if found and not fixed else []}
    planned = make_planned_spec(spec, layout)
    # More ranks than any host has slots can be planned.
    problems = [problem for problem in find_problems(planned) if problem.field != "layout"]
    if problems := problems or find_size_problems(planned):
        return {**answer, "problems": [problem.message for problem in problems]}
    cluster = predict_cluster(planned, list_hosts(planned))
    estimate: Estimate = run_task("estimate", planned, cluster, {})
    values = _compare(estimate, run, found.axes if found else {}, on_gpu=planned.resources.device == "cuda")
    return {**answer, "hardware": estimate["cluster"]["accelerator"], "values": values}


def _read_run(job: Job) -> _Run:
    attempt = job.attempts.filter(number=job.attempt).first()
    diagnosis = (attempt.diagnosis if attempt else None) or {}
    step_s = (diagnosis.get("measured") or {}).get("step_s")
    try:
        state: HistoryState = query_history(job.id, job.attempt, lambda tables: tables.state)
    except NoHistoryError:
        return _Run(step_s, None, [], False)
    traffic = _sum_traffic(state)
    has_steps = any(totals["ran"] for totals in state["ranks"].values())
    return _Run(step_s, max(state["peaks"].values(), default=None), traffic, has_steps)


def _sum_traffic(state: HistoryState) -> list[GroupTraffic]:
    """Return the mean traffic per step of the ranks that use a group, because stages use different groups."""
    ranks = [totals for totals in state["ranks"].values() if totals["ran"]]
    calls: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
    for totals in ranks:
        for cell in totals["exact"]:
            if cell["group_size"] > 1:
                per_step = cell["count"] / totals["ran"], cell["payload_bytes"] / totals["ran"]
                calls[cell["axis"], cell["group_size"], cell["op"]].append(per_step)
    return [
        GroupTraffic(label, size, op, fmean(count for count, _ in found), sum(byte for _, byte in found) / len(ranks))
        for (label, size, op), found in sorted(calls.items())
    ]


def _compare(estimate: Estimate, run: _Run, axes: dict[tuple[str, int], str], *, on_gpu: bool) -> list[PredictedValue]:
    time = estimate["time"]
    step_share = time["interval"]["share"]
    values = [_make_value("step_time", "s", time["step_s"], run.step_s, share=step_share)]
    if on_gpu:  # on CPU ranks, the resident memory of a script includes Python and its libraries
        share = estimate["memory_interval"]["share"]
        values.append(_make_value("peak_memory", "B", estimate["peak_memory_bytes"], run.peak_bytes, share=share))
    predicted: dict[str, float] = defaultdict(float)
    for stage in estimate["stages"]:
        for row in stage["traffic"]:
            predicted[row["axis"]] += row["payload_bytes"] / len(estimate["stages"])
    measured: dict[str, float] = defaultdict(float)
    for group in run.traffic:
        measured[axes.get((group.label, group.size), "other")] += group.payload_bytes
    for axis in sorted({*predicted, *measured}):
        found = measured.get(axis, 0.0) if run.traffic else None
        values.append(_make_value("traffic", "B", predicted.get(axis), found, axis=axis))
    return values


def _make_value(name: str, unit: str, predicted: float | None, measured: Any, **others: Any) -> PredictedValue:
    value: PredictedValue = {
        "name": name,
        "axis": None,
        "unit": unit,
        "predicted": predicted,
        "share": None,
        "measured": measured,
        "difference": measured / predicted - 1 if measured is not None and predicted else None,
    }
    return {**value, **others}  # type: ignore[typeddict-item]
