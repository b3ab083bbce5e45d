"""Runs side by side: where their specs differ, their curves, traffic and step parts, and what was planned of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from jobs.core.job_details import Older
from jobs.models import Job
from jobs.runs.history.queries.parts import Parts, parts_together
from jobs.runs.history.queries.shapes import Columns
from jobs.runs.history.store.folder import GoneError
from jobs.runs.history.store.query import Tables, ask
from planner.cost.correction import Interval
from planner.cost.estimate import TimeEstimate
from planner.facts.kinds import drop_unused_fields
from planner.facts.parse_spec import SchemaFrom

LEAST, MOST = 2, 6
MOST_POINTS = 1000  # of each curve


class Difference(TypedDict):
    """A field of the specs on which they differ, and its value in each; null where a spec has none."""

    field: str
    values: list[Any]


class RunTraffic(TypedDict):
    """Traffic of a whole run, all ranks."""

    axis: str
    op: str
    calls: int
    payload_bytes: int
    busy_s: float


class Curve(TypedDict):
    """A run by its steps, thinned, all lists of one length; null is what nobody told, or no number."""

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
    """Losses of validations, all lists of one length."""

    step: NotRequired[list[int]]
    elapsed_s: NotRequired[list[float | None]]
    loss: NotRequired[list[float | None]]


class Foretold(TypedDict):
    """What was predicted of a run as it was submitted: the whole is in its job's estimate."""

    time: NotRequired[TimeEstimate]
    peak_memory_bytes: NotRequired[
        Annotated[int, Field(description="Predicted peak memory of the rank with the highest peak.")]
    ]
    memory_interval: NotRequired[Interval]


class Compared(TypedDict):
    """One of the runs. Empty where nothing is kept of it."""

    job: str
    name: str
    attempt: int
    recorded: Annotated[bool, Field(description="True if the history of the run is stored.")]
    curve: Annotated[Columns, SchemaFrom(Curve)]
    validation: Annotated[Columns, SchemaFrom(Validation)]
    traffic: list[RunTraffic]
    parts: Parts | None
    plan: Annotated[Foretold | Older, Field(description="Prediction for the run. Empty if the run has no prediction.")]


class Comparison(TypedDict):
    """In the order asked for."""

    jobs: list[Compared]
    differences: list[Difference]


def comparison(jobs: list[Job]) -> Comparison:
    """Raises BusyError."""
    return {"jobs": [_one(job) for job in jobs], "differences": differences([job.spec for job in jobs])}


def differences(specs: list[Mapping[str, Any]]) -> list[Difference]:
    """Fields in dotted words, but for the name, which says nothing, and for what a job's kind does not read."""
    flat = [dict(_leaves(drop_unused_fields(spec))) for spec in specs]
    fields = dict.fromkeys(field for one in flat for field in one if field != "name")
    found: list[Difference] = [{"field": field, "values": [one.get(field) for one in flat]} for field in fields]
    return [one for one in found if any(value != one["values"][0] for value in one["values"])]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{path}.{name}" if path else name)]
    return [(path, value)]


def _one(job: Job) -> Compared:
    plan: Any = {name: job.estimate[name] for name in Foretold.__annotations__ if name in job.estimate}
    told: Compared = {
        "job": job.id,
        "name": job.name,
        "attempt": job.attempt,
        "recorded": False,
        "curve": {},
        "validation": {},
        "traffic": [],
        "parts": None,
        "plan": plan,
    }
    try:
        return ask(job.id, job.attempt, lambda tables: _told(tables, told))
    except GoneError:
        return told


def _told(tables: Tables, told: Compared) -> Compared:
    [(began, steps, last)] = tables.rows("SELECT min(time - step_s), count(DISTINCT step), max(step) FROM steps")
    [(before,)] = tables.rows("SELECT coalesce(max(step), 0) FROM marks WHERE kind = 'resume'")
    stride = max(1, -(-steps // MOST_POINTS))
    per_step = (
        "SELECT step, arg_min(time, rank) - ? AS elapsed_s, max(tokens) AS each, max(loss) AS loss,"
        " max(step_s) AS step_s, max(grad_norm) AS grad_norm, max(learning_rate) AS learning_rate,"
        " max(over) AS over FROM steps GROUP BY step"
    )
    seen = "first_value(each) OVER (ORDER BY step) * ?"
    so_far = f"SELECT *, {seen} + sum(each * over) OVER (ORDER BY step) AS so_far FROM ({per_step})"
    curve = tables.columns(
        "SELECT step, elapsed_s, try_cast(so_far AS BIGINT) AS tokens, loss, step_s,"
        " each / nullif(step_s, 0) AS tokens_s, grad_norm, learning_rate"
        f" FROM ({so_far}) WHERE step % ? = 0 OR over > 1 OR step = ? ORDER BY step",
        before,
        began,
        stride,
        last,
    )
    validation = tables.columns(
        "SELECT step, time - ? AS elapsed_s, value AS loss FROM marks WHERE kind = 'validation' ORDER BY step", began
    )
    traffic: list[RunTraffic] = [
        {"axis": axis, "op": op, "calls": int(calls), "payload_bytes": int(payload), "busy_s": busy}
        for axis, op, calls, payload, busy in tables.rows(
            "SELECT axis, op, sum(calls), sum(payload_bytes), sum(busy_s) FROM traffic"
            " GROUP BY axis, op ORDER BY axis, op"
        )
    ]
    return {
        **told,
        "recorded": True,
        "curve": curve,
        "validation": validation,
        "traffic": traffic,
        "parts": parts_together(tables),
    }
