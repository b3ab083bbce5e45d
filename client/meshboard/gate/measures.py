"""What a finished job measured, by name.

bytes, bytes.AXIS, bytes.AXIS.OP   payload bytes of a step, all ranks together
calls, calls.AXIS, calls.AXIS.OP   collectives of a step, all ranks together
step_time                          seconds, the median of rank 0's steps without its first ones
tokens_per_s                       of the last steps
peak_memory                        bytes, of the fullest rank
loss@STEP, loss                    training loss after a step; after the last
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshboard.answers import Facts, JobDetail, VerdictRow
from meshboard.errors import WrongError

TRAFFIC = re.compile(r"(bytes|calls)(\.[^.]+)?(\.[^.]+)?")
UNITS = {"bytes": "B", "calls": "", "step_time": "s", "tokens_per_s": "tokens/s", "peak_memory": "B", "loss": ""}


class UnknownError(WrongError):
    """A run does not tell what was asked for, in words."""


@dataclass(frozen=True)
class Run:
    """A run's figures. `sent` and `calls` are of a step, by (axis, op); None where its ranks told none. `no_sent` and
    `no_peak`: why they are not told, where only some of its ranks are known."""

    name: str
    step_time: float | None = None
    tokens_per_s: float | None = None
    peak_memory: float | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    sent: Mapping[tuple[str, str], float] = field(default_factory=dict)
    calls: Mapping[tuple[str, str], float] = field(default_factory=dict)
    last_step: int | None = None  # None: nobody told
    planned: tuple[int, int] | None = None  # bytes and calls that were not as predicted; None: not of all ranks
    no_sent: str = ""
    no_peak: str = ""

    def value(self, measure: str) -> float:
        """Raises UnknownError."""
        found = self._told(measure)
        if found is None:
            raise UnknownError(self.silence(measure, self.no_peak if measure == "peak_memory" else ""))
        if not math.isfinite(found):
            raise UnknownError(f"{measure} of {self.name} is {found}, which is not a finite number.")
        return found

    def silence(self, what: str, why: str) -> str:
        """That it does not tell something."""
        return f"{self.name} has no {what}" + (f": {why}" if why else "")

    def _told(self, measure: str) -> float | None:
        if TRAFFIC.fullmatch(measure):
            return self._traffic(measure)
        if measure == "loss" or measure.startswith("loss@"):
            return self._loss(measure)
        return {
            "step_time": self.step_time,
            "tokens_per_s": self.tokens_per_s,
            "peak_memory": self.peak_memory,
        }[measure]

    def table(self, kind: str) -> Mapping[tuple[str, str], float]:
        """Bytes or calls by axis and op."""
        return self.sent if kind == "bytes" else self.calls

    def _traffic(self, measure: str) -> float:
        kind, *wanted = measure.split(".")
        table = self.table(kind)
        if not table:
            raise UnknownError(self.silence(kind, self.no_sent or "no step was metered"))
        # fsum: the same in whatever order it was told
        return math.fsum(value for key, value in table.items() if list(key)[: len(wanted)] == wanted)

    def _loss(self, measure: str) -> float:
        if not self.losses:
            raise UnknownError(f"{self.name} has no loss")
        last = self.last_step if self.last_step is not None else max(self.losses)
        step = last if measure == "loss" else int(measure.removeprefix("loss@"))
        if step not in self.losses:  # one that was no number is not told
            near = min(self.losses, key=lambda told: abs(told - step))
            which = f"its last step {step}" if measure == "loss" else f"step {step}"
            raise UnknownError(f"{self.name} has no loss at {which}. The nearest stored loss is at step {near}.")
        return self.losses[step]


def unit_of(measure: str) -> str:
    return UNITS[re.split(r"[.@]", measure)[0]]


def run_of(told: JobDetail) -> Run:
    """The figures of a job as `GET /jobs/ID` tells it.

    Raises:
        UnknownError: it has not ended well.
    """
    name = f"job {told.get('id') or told.get('name')}"  # several of one spec share their name
    if told.get("status") != "succeeded":
        raise UnknownError(f"{name} has the status {told.get('status')}. Use a job that succeeded.")
    summary = (told.get("exit") or {}).get("summary") or {}
    steps = summary.get("ran_steps", summary.get("steps", 0))
    ranks, left_out = told.get("world_size", 1), summary.get("cells_left_out", 0)
    sent, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cells in (summary.get("cells") or {}).values() if not left_out else ():
        for cell in cells:
            if cell["phase"] == "step":
                sent[cell["axis"], cell["op"]] += cell["payload_bytes"]
                calls[cell["axis"], cell["op"]] += cell["count"]
    peaks = summary.get("peak_bytes") or {}
    some_peaks = 0 < len(peaks) < ranks
    return Run(
        name=name,
        step_time=(summary.get("measured") or {}).get("step_s"),
        tokens_per_s=summary.get("tokens_per_s"),
        peak_memory=max(peaks.values()) if peaks and not some_peaks else None,
        losses={point["step"]: point["loss"] for point in summary.get("losses") or []},
        last_step=summary.get("steps"),
        sent={key: value / steps for key, value in sent.items()} if steps else {},
        calls={key: value / steps for key, value in calls.items()} if steps else {},
        planned=_apart(summary.get("verdict") or {}, ranks),
        no_sent=f"only {max(0, ranks - left_out)} of {ranks} ranks have stored traffic" if left_out else "",
        no_peak=f"only {len(peaks)} of {ranks} ranks have a stored peak" if some_peaks else "",
    )


def run_of_facts(name: str, facts: Facts) -> Run:
    """The figures that a board keeps of a baseline."""
    apart = facts["apart"]
    return Run(
        name=f"baseline {name}",
        step_time=facts["step_s"],
        tokens_per_s=facts["tokens_per_s"],
        peak_memory=facts["peak_bytes"],
        losses={point["step"]: point["loss"] for point in facts["losses"]},
        last_step=facts.get("last_step"),
        sent={(row["axis"], row["op"]): row["bytes"] for row in facts["sent"]},
        calls={(row["axis"], row["op"]): row["calls"] for row in facts["sent"]},
        planned=None if apart is None else (apart["bytes"], apart["calls"]),
        no_sent=facts.get("no_sent", ""),
        no_peak=facts.get("no_peak", ""),
    )


def _apart(verdicts: Mapping[str, Sequence[VerdictRow]], ranks: int) -> tuple[int, int] | None:
    rows = [row for rank in verdicts.values() for row in rank]
    if len(verdicts) < ranks:
        return None
    return (
        sum(abs(row["measured_bytes"] - row["predicted_bytes"]) for row in rows),
        sum(abs(row["measured_count"] - row["predicted_count"]) for row in rows),
    )
