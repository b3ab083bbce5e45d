"""Return what attempts produced: traffic checks, verification, benchmarks, checkpoints, and traced steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from django.db.models import Sum
from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.items import CheckpointItem
from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from jobs.models import EXTERNAL_ENGINE, Attempt, Job
from jobs.planning.checkpoints import get_max_checkpoints, read_checkpoint_log
from jobs.runs.history.store.folder import NoHistoryError
from jobs.runs.history.store.query import HistoryTables, query_history
from jobs.runs.traces.trace_events import EventTrace, parse_trace
from planner.facts.collectives import LabResult
from planner.facts.kinds import get_kind_rules
from planner.facts.parse_spec import SchemaFrom
from planner.facts.validation import format_count


class Results(TypedDict):
    """Hold the results of an attempt so far, in bytes."""

    attempt: int
    ended: Annotated[bool, Field(description="True if the attempt has ended, so the data is final.")]
    verdicts: Annotated[dict[str, list[VerdictRow]], Field(description="Predicted and measured traffic per rank.")]
    off_bytes: Annotated[
        int | None,
        Field(
            description=(
                "Total difference between measured and predicted traffic, in bytes. null until all ranks have reported."
            )
        ),
    ]
    proof: Annotated[
        ProofItem | None,
        Field(
            description="Verification results: replica consistency, and a comparison with the single-process reference."
        ),
    ]
    dry_runs: list[DryRunItem]
    peak_bytes: Annotated[dict[str, int], Field(description="Peak memory of each rank.")]
    memory: Annotated[dict[str, MemoryParts], Field(description="Memory breakdown of each rank in its last step.")]
    lab: Annotated[Annotated[dict[str, Any], SchemaFrom(LabResult)] | None, Field(description="Result of a benchmark.")]


def get_results(job: Job, number: int) -> Results:
    """Return the results of an attempt from its exit report, or from its history while it runs.

    Raise NoHistoryError if neither exists, and BusyError.
    """
    attempt = job.attempts.filter(number=number).first()
    if attempt is None:
        raise NoHistoryError(f"Attempt {number} has not started.")
    summary = (attempt.exit or {}).get("summary")
    if summary is None:
        state = query_history(job.id, number, lambda tables: tables.state)
        summary = {
            "verdict": {str(rank): rows for rank, rows in state["verdicts"].items()},
            "proof": state["proof"],
            "dry_runs": list(state["dry_runs"].values()),
            "peak_bytes": {str(rank): peak for rank, peak in state["peaks"].items()},
            "memory": {str(rank): parts for rank, parts in state.get("memory", {}).items()},
        }
    verdicts = summary.get("verdict", {})
    differences = [abs(row["measured_bytes"] - row["predicted_bytes"]) for rows in verdicts.values() for row in rows]
    ranks = attempt.members.aggregate(ranks=Sum("num_ranks"))["ranks"]
    return {
        "attempt": number,
        "ended": attempt.ended is not None,
        "verdicts": verdicts,
        "off_bytes": sum(differences) if verdicts and len(verdicts) >= (ranks or job.world_size) else None,
        "proof": summary.get("proof"),
        "dry_runs": summary.get("dry_runs", []),
        "peak_bytes": summary.get("peak_bytes", {}),
        "memory": summary.get("memory", {}),
        "lab": summary.get("lab"),
    }


class StoredCheckpoint(TypedDict):
    """Describe a checkpoint in bytes, seconds, and Unix seconds. Unknown values are null."""

    attempt: int
    name: Annotated[
        str | None,
        Field(description="Checkpoint name to use in `train.resume`. null if the checkpoint could not be written."),
    ]
    step: int | None
    time: float | None
    num_bytes: int | None
    stall_s: Annotated[float | None, Field(description="Seconds that training waited for the checkpoint.")]
    save_s: float | None
    problem: str
    kept: Annotated[
        bool,
        Field(
            description=(
                "True if the checkpoint is on disk. An attempt keeps the newest `train.keep_checkpoints` checkpoints."
            )
        ),
    ]


def list_checkpoints(job: Job) -> list[StoredCheckpoint]:
    """Return the checkpoints of a job, the newest first. Raises BusyError."""
    max_checkpoints = get_max_checkpoints(job)
    return [
        checkpoint
        for attempt in job.attempts.order_by("-number")
        for checkpoint in _list_of_attempt(attempt, max_checkpoints)
    ]


def _list_of_attempt(attempt: Attempt, max_checkpoints: int) -> Iterator[StoredCheckpoint]:
    saves = read_checkpoint_log(attempt)
    if saves.newest and saves.newest not in {item["name"] for item in saves.items}:
        unknown = {"step": None, "time": None, "num_bytes": None, "stall_s": None, "save_s": None}
        yield {"attempt": attempt.number, "name": saves.newest, "problem": "", "kept": True, **unknown}  # type: ignore[typeddict-item]
    for item in reversed(saves.items):
        values = {name: item[name] for name in ("name", "step", "time", "num_bytes", "stall_s", "save_s", "problem")}
        is_retained = item["name"] is not None and saves.count_after(item["step"]) < max_checkpoints
        yield {"attempt": attempt.number, **values, "kept": is_retained}  # type: ignore[typeddict-item]


def read_checkpoints(attempt: Attempt) -> tuple[list[CheckpointItem], bool]:
    """Return the checkpoints of an attempt, and True if no telemetry was lost. Raise BusyError."""
    try:
        return query_history(
            attempt.job_id, attempt.number, lambda tables: (tables.state["checkpoints"], not tables.state["lost"])
        )
    except NoHistoryError:
        return [], False


MAX_LISTED_STEPS = 1000  # the newest
HELD_BY_HOSTS = 64  # last steps that hosts can still send: fewer if steps are large


def list_traced_steps(job: str, attempt: int) -> list[int]:
    """Return the traced steps of an attempt, in order. Raise BusyError."""
    sql = "SELECT DISTINCT step FROM calls UNION SELECT DISTINCT step FROM spans ORDER BY step DESC LIMIT ?"
    try:
        rows = query_history(job, attempt, lambda tables: tables.fetch_rows(sql, MAX_LISTED_STEPS))
    except NoHistoryError:
        return []
    return sorted(step for (step,) in rows)


def read_traced_step(job: str, attempt: int, step: int) -> EventTrace | None:
    """Return the events of a step, None if it has none. Raise BusyError."""

    def read(tables: HistoryTables) -> EventTrace:
        calls = tables.fetch_columns("SELECT * FROM calls WHERE step = ? ORDER BY issued, rank", step)
        spans = tables.fetch_columns("SELECT * FROM spans WHERE step = ? ORDER BY began, rank", step)
        return parse_trace(calls, spans)

    try:
        trace = query_history(job, attempt, read)
    except NoHistoryError:
        return None
    return trace if trace.calls or trace.spans else None


def explain_untraceable(job: Job, step: int) -> str:
    """Return why no rank of the current attempt can trace a step, "" if one may. Raises BusyError."""
    if (
        get_kind_rules(job.spec).trains
        and job.engine != EXTERNAL_ENGINE
        and step > (steps := job.spec["train"]["steps"])
    ):
        return f"`step` is {step}, but the run has {format_count(steps, 'step')}. Use a step from 1 to {steps}."
    try:
        progress = query_history(job.id, job.attempt, lambda tables: tables.state["progress"])
    except NoHistoryError:
        return ""
    if progress is None or step >= (first_held := progress["step"] - HELD_BY_HOSTS + 1):
        return ""
    current = progress["step"]
    return (
        f"`step` is {step}, but hosts keep the last {HELD_BY_HOSTS} steps and the run is at step {current}. "
        f"Use step {first_held} or later."
    )
