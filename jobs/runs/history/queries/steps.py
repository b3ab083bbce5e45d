"""Steps that the history has event by event."""

from __future__ import annotations

from jobs.models import ELSEWHERE, Job
from jobs.runs.history.store.folder import GoneError
from jobs.runs.history.store.query import Tables, ask
from jobs.runs.traces.shapes import Trace, of_tables
from planner.facts.kinds import get_kind_rules
from planner.facts.validation import format_count

MOST_STEPS = 1000  # told of, the newest
HELD_BY_HOSTS = 64  # the last ones, to be told when somebody asks; fewer where they are large


def steps_kept(job: str, attempt: int) -> list[int]:
    """Which steps there are, in order; none of what was never recorded.

    Raises:
        BusyError: too much is asked at once.
    """
    sql = "SELECT DISTINCT step FROM calls UNION SELECT DISTINCT step FROM spans ORDER BY step DESC LIMIT ?"
    try:
        found = ask(job, attempt, lambda tables: tables.rows(sql, MOST_STEPS))
    except GoneError:
        return []
    return sorted(step for (step,) in found)


def step_kept(job: str, attempt: int, step: int) -> Trace | None:
    """A step's events, None where there are none.

    Raises:
        BusyError: too much is asked at once.
    """

    def read(tables: Tables) -> Trace:
        calls = tables.columns("SELECT * FROM calls WHERE step = ? ORDER BY issued, rank", step)
        spans = tables.columns("SELECT * FROM spans WHERE step = ? ORDER BY began, rank", step)
        return of_tables(calls, spans)

    try:
        found = ask(job, attempt, read)
    except GoneError:
        return None
    return found if found.calls or found.spans else None


def why_never(job: Job, step: int) -> str:
    """Why no rank of the current attempt will tell a step; empty where one may. Raises BusyError."""
    if get_kind_rules(job.spec).trains and job.engine != ELSEWHERE and step > (steps := job.spec["train"]["steps"]):
        return f"`step` is {step}, but the run has {format_count(steps, 'step')}. Use a step from 1 to {steps}."
    try:
        progress = ask(job.id, job.attempt, lambda tables: tables.state["progress"])
    except GoneError:
        return ""
    if progress is None or step >= (least := progress["step"] - HELD_BY_HOSTS + 1):
        return ""
    at = progress["step"]
    return (
        f"`step` is {step}, but hosts keep the last {HELD_BY_HOSTS} steps and the run is at step {at}. "
        f"Use step {least} or later."
    )
