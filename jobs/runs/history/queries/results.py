"""What an attempt proved or found: predicted beside measured, its proofs, a dry run's ranks, a lab's result."""

from __future__ import annotations

from typing import Annotated, Any

from django.db.models import Sum
from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.results import DryRunItem, MemoryParts, ProofItem, VerdictRow
from jobs.models import Job
from jobs.runs.history.store.folder import GoneError
from jobs.runs.history.store.query import ask
from planner.facts.collectives import LabResult
from planner.facts.parse_spec import SchemaFrom


class Results(TypedDict):
    """Of one attempt, so far. Bytes."""

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


def results(job: Job, number: int) -> Results:
    """Of the attempt's exit report; of one that runs, of its history.

    Raises:
        GoneError: there is neither.
        BusyError: too much is asked at once.
    """
    attempt = job.attempts.filter(number=number).first()
    if attempt is None:
        raise GoneError(f"Attempt {number} has not started.")
    summary = (attempt.exit or {}).get("summary")
    if summary is None:
        state = ask(job.id, number, lambda tables: tables.state)
        summary = {
            "verdict": {str(rank): rows for rank, rows in state["verdicts"].items()},
            "proof": state["proof"],
            "dry_runs": list(state["dry_runs"].values()),
            "peak_bytes": {str(rank): peak for rank, peak in state["peaks"].items()},
            "memory": {str(rank): parts for rank, parts in state.get("memory", {}).items()},
        }
    verdicts = summary.get("verdict", {})
    off = [abs(row["measured_bytes"] - row["predicted_bytes"]) for rows in verdicts.values() for row in rows]
    ranks = attempt.members.aggregate(ranks=Sum("num_ranks"))["ranks"]
    return {
        "attempt": number,
        "ended": attempt.ended is not None,
        "verdicts": verdicts,
        "off_bytes": sum(off) if verdicts and len(verdicts) >= (ranks or job.world_size) else None,
        "proof": summary.get("proof"),
        "dry_runs": summary.get("dry_runs", []),
        "peak_bytes": summary.get("peak_bytes", {}),
        "memory": summary.get("memory", {}),
        "lab": summary.get("lab"),
    }
