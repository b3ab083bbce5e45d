"""What the gate asks of a run, from what its ranks told as it ended. The client computes the same of a job
(`meshboard.gate.measures`); a test holds the two together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from contracts.telemetry.vocabulary import SCRIPT_SETUP_STEPS

MOST_SENT = 2000  # axes and collectives of one run: a script names its own groups


class NoFactsError(ValueError):
    """Nothing can be held to this run; says why."""


class Sent(TypedDict):
    """Of a step, all ranks together; payload bytes."""

    axis: str
    op: str
    bytes: float
    calls: float


class LossAt(TypedDict):
    """Training loss after a step."""

    step: int
    loss: float


class Apart(TypedDict):
    """Measured from predicted, summed over all ranks, axes and collectives without their signs."""

    bytes: int
    calls: int


class Facts(TypedDict):
    """A run's figures; null what it did not tell."""

    steps: Annotated[
        int,
        Field(description="Number of steps in the means of bytes and calls, without the first two steps of a script."),
    ]
    step_s: Annotated[float | None, Field(description="Median step time of rank 0, without the first three steps.")]
    tokens_per_s: float | None
    peak_bytes: Annotated[int | None, Field(description="Peak memory of the rank with the highest peak.")]
    losses: list[LossAt]
    last_step: NotRequired[
        Annotated[int, Field(description="Number of the last step. Absent for runs of older versions.")]
    ]
    sent: list[Sent]
    no_sent: NotRequired[Annotated[str, Field(description="Reason why `sent` is empty.")]]
    no_peak: NotRequired[Annotated[str, Field(description="Reason why `peak_bytes` is null.")]]
    apart: Annotated[
        Apart | None,
        Field(
            description="Difference between measured and predicted traffic. null if a rank did not compare the traffic."
        ),
    ]


def facts(exit_report: Mapping[str, Any] | None, ranks: int) -> Facts:
    """Of the exit report of an attempt on so many ranks that succeeded.

    Raises:
        NoFactsError: it told nothing, or of more groups than are kept.
    """
    summary = (exit_report or {}).get("summary")
    if not summary:
        raise NoFactsError("The ranks of the job reported no summary.")
    steps = summary.get("ran_steps", summary.get("steps", 0))
    if not steps:
        if summary.get("steps"):
            raise NoFactsError(f"The script completed no step after its {SCRIPT_SETUP_STEPS} set-up steps.")
        raise NoFactsError("The job completed no step.")
    left_out = summary.get("cells_left_out", 0)
    sent = [] if left_out else _sent(summary.get("cells") or {}, steps)
    if len(sent) > MOST_SENT:
        raise NoFactsError(
            f"The job has {len(sent):,} combinations of axis and collective. The maximum is {MOST_SENT:,}."
        )
    peaks = summary.get("peak_bytes") or {}
    some_peaks = 0 < len(peaks) < ranks
    found: Facts = {
        "steps": steps,
        "step_s": (summary.get("measured") or {}).get("step_s"),
        "tokens_per_s": summary.get("tokens_per_s"),
        "peak_bytes": None if some_peaks else max(peaks.values(), default=None),
        "last_step": summary.get("steps", steps),
        "losses": [{"step": point["step"], "loss": point["loss"]} for point in summary.get("losses") or []],
        "sent": sent,
        "apart": _apart(summary.get("verdict") or {}, ranks),
    }
    if left_out:
        found["no_sent"] = f"only {max(0, ranks - left_out)} of {ranks} ranks have stored traffic"
    if some_peaks:
        found["no_peak"] = f"only {len(peaks)} of {ranks} ranks have a stored peak"
    return found


def _sent(cells: Mapping[str, list[dict[str, Any]]], steps: int) -> list[Sent]:
    payload, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cell in (cell for told in cells.values() for cell in told if cell["phase"] == "step"):
        payload[cell["axis"], cell["op"]] += cell["payload_bytes"]
        calls[cell["axis"], cell["op"]] += cell["count"]
    return [
        {"axis": axis, "op": op, "bytes": payload[axis, op] / steps, "calls": calls[axis, op] / steps}
        for axis, op in sorted(payload)
    ]


def _apart(verdicts: Mapping[str, list[dict[str, Any]]], ranks: int) -> Apart | None:
    rows = [row for told in verdicts.values() for row in told]
    if len(verdicts) < ranks:
        return None
    return {
        "bytes": sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        "calls": sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
    }
