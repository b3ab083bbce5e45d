"""How a job stands just now: its step, loss and step time, and what each axis sends: live from its events, and of one
that is over from what the recorder keeps, which is some seconds behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshboard.api import Client
from meshboard.errors import RefusedError
from meshboard.events import Event
from meshboard.job import Job

RATE_S = 10  # over which a rate is taken
SHOWN_S = 30  # of the small curves
ON_ITS_WAY_S = 2  # what was sent so lately may not have been told of yet


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


def looks(board: Client, job: Job) -> Iterator[Look]:
    """One whenever something is told, each second at least, until the job has ended.

    Raises:
        RefusedError: also, with status 400 or 404, by a board that cannot tell of it live.
        AwayError
    """
    live = Live()
    for event in board.events(job.id, live_s=SHOWN_S):
        if event.name == "verdict" or (event.name == "state" and _is_news(event, job)):
            job = board.job(job.id)
        live.hear(event)
        yield live.look(job)


def _is_news(event: Event, job: Job) -> bool:
    """Of a change of status: those that it had before are told first."""
    return (event.data["status"], event.data["attempt"]) != (job.status, job.attempt)


class Live:
    """What an attempt's events add up to."""

    def __init__(self) -> None:
        self._step: Mapping[str, Any] = {}
        self._loss: float | None = None
        self._sent: dict[tuple[str, int], int] = {}  # by axis and second
        self._attempt, self._at = 0, 0.0

    def hear(self, event: Event) -> None:
        if event.name not in ("step", "traffic"):
            return
        if event.data["attempt"] != self._attempt:
            self._attempt, self._step, self._loss, self._sent = event.data["attempt"], {}, None, {}
        if event.name == "step":
            self._step = event.data
            if event.data["loss"] is not None or "not_finite" in event.data:  # a rank that knows it
                self._loss = event.data["loss"]
            return
        self._at = event.data["at"]
        for one in event.data["sent"]:
            bin = (one["axis"], one["second"])
            self._sent[bin] = self._sent.get(bin, 0) + one["bytes"]
        self._sent = {bin: sent for bin, sent in self._sent.items() if bin[1] > self._at - 2 * SHOWN_S}

    def look(self, job: Job) -> Look:
        curves: dict[str, list[float]] = {}
        # The last second that is whole; while nothing comes it goes on, and the rates go down to what is sent: nothing.
        end = max([int(self._at) - ON_ITS_WAY_S, *(second - 1 for _, second in self._sent)])
        for (axis, second), sent in self._sent.items():
            curve = curves.setdefault(axis, [0.0] * SHOWN_S)
            if 0 < (place := second - end + SHOWN_S) <= SHOWN_S:
                curve[place - 1] += sent
        known_s = max(1, min(RATE_S, end + 1 - min((second for _, second in self._sent), default=end)))
        rates = {axis: sum(curve[-known_s:]) / known_s for axis, curve in sorted(curves.items())}
        step, step_s = int(self._step.get("step", 0)), self._step.get("step_s")
        return Look(job, step, self._loss, step_s, rates, {axis: curves[axis] for axis in rates})


def look(board: Client, job: Job) -> Look:
    """Raises RefusedError, AwayError."""
    nothing = Look(job, 0, None, None, {}, {})
    try:
        kept = [attempt for attempt in board.kept(job.id) if attempt["attempt"] == job.attempt]
        first, last = (kept[0]["from"], kept[0]["to"]) if kept else (None, None)
        return nothing if first is None or last is None else _look(board, job, first, last)
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
