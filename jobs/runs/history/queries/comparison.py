"""Compare runs: differences of specs, curves, traffic, step parts, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.job_details import StoredByOlderVersion
from jobs.models import Job
from jobs.runs.history.queries.metrics import find_loss_series, read_curve
from jobs.runs.history.queries.step_breakdown import MeanStepParts, get_mean_parts
from jobs.runs.history.store.folder import NoHistoryError
from jobs.runs.history.store.query import Columns, HistoryTables, query_history
from planner.cost.estimate import TimeEstimate
from planner.cost.learning import Interval
from planner.facts.kinds import drop_unused_fields
from planner.facts.parse_spec import SchemaFrom

MIN_RUNS, MAX_RUNS = 2, 6
MAX_POINTS = 1000  # per curve


class Difference(TypedDict):
    """Hold a field that differs between specs and its values, null if a spec lacks the field."""

    field: str
    values: list[Any]


class RunTraffic(TypedDict):
    """Hold the traffic of a whole run over all ranks."""

    axis: str
    op: str
    calls: int
    payload_bytes: int
    busy_s: float


class Curve(TypedDict):
    """Hold a thinned run by steps, in lists of equal length. Unknown and non-finite values are null."""

    step: NotRequired[list[int]]
    elapsed_s: NotRequired[
        Annotated[list[float | None], Field(description="Seconds since the start of the first step.")]
    ]
    tokens: NotRequired[
        Annotated[
            list[int | None],
            Field(description="Number of tokens up to each step, including steps before a resumed checkpoint."),
        ]
    ]
    loss: NotRequired[list[float | None]]
    step_s: NotRequired[list[float | None]]
    tokens_s: NotRequired[list[float | None]]
    grad_norm: NotRequired[list[float | None]]
    learning_rate: NotRequired[list[float | None]]


class Validation(TypedDict):
    """Hold validation losses in lists of equal length."""

    step: NotRequired[list[int]]
    elapsed_s: NotRequired[list[float | None]]
    loss: NotRequired[list[float | None]]


class PredictedRun(TypedDict):
    """Hold the prediction of a run at submit. The job's estimate has all of it."""

    time: NotRequired[TimeEstimate]
    peak_memory_bytes: NotRequired[
        Annotated[int, Field(description="Predicted peak memory of the rank with the highest peak.")]
    ]
    memory_interval: NotRequired[Interval]


class ComparedRun(TypedDict):
    """Describe a compared run. Curves are empty without a stored history."""

    job: str
    name: str
    attempt: int
    recorded: Annotated[bool, Field(description="True if the history of the run is stored.")]
    curve: Annotated[Columns, SchemaFrom(Curve)]
    validation: Annotated[Columns, SchemaFrom(Validation)]
    logged: Annotated[
        Columns,
        SchemaFrom(Validation),
        Field(description="Loss that a script reported, by the steps that the script numbers."),
    ]
    traffic: list[RunTraffic]
    parts: MeanStepParts | None
    plan: Annotated[
        PredictedRun | StoredByOlderVersion,
        Field(description="Prediction for the run. Empty if the run has no prediction."),
    ]


class Comparison(TypedDict):
    """Compare runs in the order of the request."""

    jobs: list[ComparedRun]
    differences: list[Difference]


def compare_jobs(jobs: list[Job]) -> Comparison:
    """Compare jobs. Raises BusyError."""
    return {"jobs": [_compare_job(job) for job in jobs], "differences": find_differences([job.spec for job in jobs])}


def find_differences(specs: list[Mapping[str, Any]]) -> list[Difference]:
    """Return fields that differ, except the job name and fields that the job kind does not read."""
    flat_specs = [dict(_flatten(drop_unused_fields(spec))) for spec in specs]
    names = dict.fromkeys(name for fields in flat_specs for name in fields if name != "name")
    compared: list[Difference] = [
        {"field": name, "values": [fields.get(name) for fields in flat_specs]} for name in names
    ]
    return [field for field in compared if any(value != field["values"][0] for value in field["values"])]


def _flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _flatten(inner, f"{path}.{name}" if path else name)]
    return [(path, value)]


def _compare_job(job: Job) -> ComparedRun:
    plan: Any = {name: job.estimate[name] for name in PredictedRun.__annotations__ if name in job.estimate}
    compared: ComparedRun = {
        "job": job.id,
        "name": job.name,
        "attempt": job.attempt,
        "recorded": False,
        "curve": {},
        "validation": {},
        "logged": {},
        "traffic": [],
        "parts": None,
        "plan": plan,
    }
    try:
        return query_history(job.id, job.attempt, lambda tables: _read_history(tables, compared))
    except NoHistoryError:
        return compared


def _read_history(tables: HistoryTables, compared: ComparedRun) -> ComparedRun:
    [(start, steps, last)] = tables.fetch_rows("SELECT min(time - step_s), count(DISTINCT step), max(step) FROM steps")
    [(resumed_step,)] = tables.fetch_rows("SELECT coalesce(max(step), 0) FROM marks WHERE kind = 'resume'")
    stride = max(1, -(-steps // MAX_POINTS))
    per_step = (
        "SELECT step, arg_min(time, rank) - ? AS elapsed_s, max(tokens) AS each, max(loss) AS loss,"
        " max(step_s) AS step_s, max(grad_norm) AS grad_norm, max(learning_rate) AS learning_rate,"
        " max(over) AS over FROM steps GROUP BY step"
    )
    tokens_before_first = "first_value(each) OVER (ORDER BY step) * ?"
    so_far = f"SELECT *, {tokens_before_first} + sum(each * over) OVER (ORDER BY step) AS so_far FROM ({per_step})"
    curve = tables.fetch_columns(
        "SELECT step, elapsed_s, try_cast(so_far AS BIGINT) AS tokens, loss, step_s,"
        " each / nullif(step_s, 0) AS tokens_s, grad_norm, learning_rate"
        f" FROM ({so_far}) WHERE step % ? = 0 OR over > 1 OR step = ? ORDER BY step",
        resumed_step,
        start,
        stride,
        last,
    )
    validation = tables.fetch_columns(
        "SELECT step, time - ? AS elapsed_s, value AS loss FROM marks WHERE kind = 'validation' ORDER BY step", start
    )
    traffic: list[RunTraffic] = [
        {"axis": axis, "op": op, "calls": int(calls), "payload_bytes": int(payload), "busy_s": busy}
        for axis, op, calls, payload, busy in tables.fetch_rows(
            "SELECT axis, op, sum(calls), sum(payload_bytes), sum(busy_s) FROM traffic"
            " GROUP BY axis, op ORDER BY axis, op"
        )
    ]
    return {
        **compared,
        "recorded": True,
        "curve": curve,
        "validation": validation,
        "logged": _read_logged_loss(tables, start),
        "traffic": traffic,
        "parts": get_mean_parts(tables),
    }


def _read_logged_loss(tables: HistoryTables, start: float | None) -> Columns:
    """Return the loss that a script reported, or no columns."""
    series = find_loss_series(tables)
    if series is None:
        return {}
    curve = read_curve(tables, series, MAX_POINTS)
    begin = curve["time"][0] if start is None else start
    return {"step": curve["step"], "elapsed_s": [time - begin for time in curve["time"]], "loss": curve["value"]}
