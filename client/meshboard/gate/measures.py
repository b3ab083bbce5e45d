"""Measures of a finished job.

bytes, bytes.AXIS, bytes.AXIS.OP   payload bytes per step of all ranks
calls, calls.AXIS, calls.AXIS.OP   collectives per step of all ranks
step_time                          seconds, median of the steps of rank 0 without the first steps
tokens_per_s                       of the last steps
peak_memory                        bytes, of the rank with the most memory
loss@STEP, loss                    training loss after a step, or after the last step
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshboard.answers import JobDetail, RunMeasurements, VerdictRow
from meshboard.errors import WrongError

TRAFFIC = re.compile(r"(bytes|calls)(\.[^.]+)?(\.[^.]+)?")
UNITS = {"bytes": "B", "calls": "", "step_time": "s", "tokens_per_s": "tokens/s", "peak_memory": "B", "loss": ""}


class MissingValueError(WrongError):
    """A run has no value of a measure."""


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of a run. A value is None if no rank reported it.

    Args:
        sent: Payload bytes per step by (axis, op).
        calls: Collectives per step by (axis, op).
        plan_difference: Bytes and calls that differ from the prediction, or None without all ranks.
        no_traffic_reason: Reason for which `sent` and `calls` are empty.
        no_peak_reason: Reason for which `peak_memory` is None.
    """

    name: str
    step_time: float | None = None
    tokens_per_s: float | None = None
    peak_memory: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], float] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], float] = field(default_factory=dict)
    last_step: int | None = None
    plan_difference: tuple[int, int] | None = None
    no_traffic_reason: str = ""
    no_peak_reason: str = ""

    def get_value(self, measure: str) -> float:
        """Return the value of a measure.

        Raises:
            MissingValueError
        """
        if TRAFFIC.fullmatch(measure):
            value: float | None = self._get_traffic_sum(measure)
        elif measure == "loss" or measure.startswith("loss@"):
            value = self._get_loss(measure)
        else:
            values = {"step_time": self.step_time, "tokens_per_s": self.tokens_per_s, "peak_memory": self.peak_memory}
            value = values[measure]
        if value is None:
            raise MissingValueError(
                self.describe_missing(measure, self.no_peak_reason if measure == "peak_memory" else "")
            )
        if not math.isfinite(value):
            raise MissingValueError(f"{measure} of {self.name} is {value}, which is not a finite number.")
        return value

    def describe_missing(self, measure: str, reason: str) -> str:
        """Return the message for a missing value."""
        return f"{self.name} has no {measure}" + (f": {reason}" if reason else "")

    def get_traffic(self, kind: str) -> Mapping[tuple[str, str], float]:
        """Return bytes or calls by axis and op."""
        return self.sent if kind == "bytes" else self.calls

    def _get_traffic_sum(self, measure: str) -> float:
        kind, *key_start = measure.split(".")
        traffic = self.get_traffic(kind)
        if not traffic:
            raise MissingValueError(self.describe_missing(kind, self.no_traffic_reason or "no step was metered"))
        # fsum gives equal sums for every order of the ranks.
        return math.fsum(value for key, value in traffic.items() if list(key)[: len(key_start)] == key_start)

    def _get_loss(self, measure: str) -> float:
        if not self.losses:
            raise MissingValueError(f"{self.name} has no loss")
        last = self.last_step if self.last_step is not None else max(self.losses)
        step = last if measure == "loss" else int(measure.removeprefix("loss@"))
        if step not in self.losses:  # a loss that is not finite is not stored
            near = min(self.losses, key=lambda known: abs(known - step))
            which = f"its last step {step}" if measure == "loss" else f"step {step}"
            raise MissingValueError(f"{self.name} has no loss at {which}. The nearest stored loss is at step {near}.")
        return self.losses[step]


def get_unit(measure: str) -> str:
    """Return the unit of a measure."""
    return UNITS[re.split(r"[.@]", measure)[0]]


def parse_job(job: JobDetail) -> MeasuredRun:
    """Return the measurements of a job in the response of `GET /jobs/ID`.

    Raises:
        MissingValueError: The job has not succeeded.
    """
    name = f"job {job.get('id') or job.get('name')}"  # jobs of one spec have equal names
    if job.get("status") != "succeeded":
        raise MissingValueError(f"{name} has the status {job.get('status')}. Use a job that succeeded.")
    summary = (job.get("exit") or {}).get("summary") or {}
    steps = summary.get("ran_steps", summary.get("steps", 0))
    ranks, left_out = job.get("world_size", 1), summary.get("cells_left_out", 0)
    sent, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cells in (summary.get("cells") or {}).values() if not left_out else ():
        for cell in cells:
            if cell["phase"] == "step":
                sent[cell["axis"], cell["op"]] += cell["payload_bytes"]
                calls[cell["axis"], cell["op"]] += cell["count"]
    peaks = summary.get("peak_bytes") or {}
    lacks_peaks = 0 < len(peaks) < ranks
    return MeasuredRun(
        name=name,
        step_time=(summary.get("measured") or {}).get("step_s"),
        tokens_per_s=summary.get("tokens_per_s"),
        peak_memory=max(peaks.values()) if peaks and not lacks_peaks else None,
        losses={point["step"]: point["loss"] for point in summary.get("losses") or []},
        last_step=summary.get("steps"),
        sent={key: value / steps for key, value in sent.items()} if steps else {},
        calls={key: value / steps for key, value in calls.items()} if steps else {},
        plan_difference=_sum_differences(summary.get("verdict") or {}, ranks),
        no_traffic_reason=f"only {max(0, ranks - left_out)} of {ranks} ranks have stored traffic" if left_out else "",
        no_peak_reason=f"only {len(peaks)} of {ranks} ranks have a stored peak" if lacks_peaks else "",
    )


def parse_facts(name: str, facts: RunMeasurements) -> MeasuredRun:
    """Return the measurements of a run that the board stores for a baseline."""
    difference = facts["apart"]
    return MeasuredRun(
        name=f"baseline {name}",
        step_time=facts["step_s"],
        tokens_per_s=facts["tokens_per_s"],
        peak_memory=facts["peak_bytes"],
        losses={point["step"]: point["loss"] for point in facts["losses"]},
        last_step=facts.get("last_step"),
        sent={(row["axis"], row["op"]): row["bytes"] for row in facts["sent"]},
        calls={(row["axis"], row["op"]): row["calls"] for row in facts["sent"]},
        plan_difference=None if difference is None else (difference["bytes"], difference["calls"]),
        no_traffic_reason=facts.get("no_sent", ""),
        no_peak_reason=facts.get("no_peak", ""),
    )


def _sum_differences(verdicts: Mapping[str, Sequence[VerdictRow]], ranks: int) -> tuple[int, int] | None:
    if len(verdicts) < ranks:
        return None
    rows = [row for rank in verdicts.values() for row in rank]
    return (
        sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
    )
