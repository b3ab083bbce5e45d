"""How a job stands just now: its step, loss and step time, and what each axis sends, from what the recorder keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshboard.api import Client
from meshboard.errors import RefusedError
from meshboard.job import Job

RATE_S = 10  # over which a rate is taken
SHOWN_S = 30  # of the small curves


class Look(NamedTuple):
    """`step`: steps completed, 0 before the first. `rates`: payload bytes a second of each axis, all ranks together,
    over the last RATE_S seconds known; `curves` the same for each of the last SHOWN_S seconds, oldest first."""

    job: Job
    step: int
    loss: float | None
    step_s: float | None
    rates: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job.id,
            "status": self.job.status,
            "attempt": self.job.attempt,
            "step": self.step,
            "steps": self.job.steps,
            "loss": self.loss,
            "step_s": self.step_s,
            "bytes_per_s": dict(self.rates),
            "verdict": self.job.verdict,
        }


def look(board: Client, job: Job) -> Look:
    """Raises RefusedError, AwayError."""
    nothing = Look(job, 0, None, None, {}, {})
    try:
        kept = [attempt for attempt in board.kept(job.id) if attempt["attempt"] == job.attempt]
        if not kept or kept[0]["to"] is None:
            return nothing
        return _look(board, job, kept[0]["from"], kept[0]["to"])
    except RefusedError as error:
        if error.status == 404:  # nothing is kept of it yet, or any more
            return nothing
        raise


def _look(board: Client, job: Job, first: float, last: float) -> Look:
    [step] = board.table(job.id, "steps", bins=1)["last_step"] or [0]
    loss = step_s = None
    if step:
        newest = board.table(job.id, "steps", steps=f"{max(step - 1, 1)}-{step}")
        told = sorted(zip(newest["step"], newest["rank"], newest["loss"], newest["step_s"], strict=True))
        losses = [loss for _, _, loss, _ in told if loss is not None]
        loss = losses[-1] if losses else None
        step_s = next(step_s for number, _, _, step_s in told if number == step)
    end = int(last)
    asked = {"from": end - SHOWN_S, "to": end, "by": "axis", "bins": SHOWN_S}
    traffic = board.table(job.id, "traffic", **asked)
    curves = _curves(traffic, end - SHOWN_S)
    known_s = max(1, min(RATE_S, end - int(first)))
    rates = {axis: sum(curve[-known_s:]) / known_s for axis, curve in curves.items()}
    return Look(job, step, loss, step_s, rates, curves)


def _curves(traffic: Mapping[str, Sequence[Any]], since: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for time, axis, num_bytes in zip(traffic["time"], traffic["axis"], traffic["payload_bytes"], strict=True):
        curve = found.setdefault(axis, [0.0] * SHOWN_S)
        curve[min(SHOWN_S - 1, int(time - since))] += num_bytes
    return dict(sorted(found.items()))
