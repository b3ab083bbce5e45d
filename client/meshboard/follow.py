"""Log lines and progress of a job while it runs: step, loss, step time, and traffic per axis.

Progress of a running job comes from its events, and progress of an ended job from its stored history.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshboard.client import Client, Job
from meshboard.errors import RefusedError
from meshboard.transport import Event

MAX_JITTER_S = 0.2  # of the events that arrive each second
GAP = "[log lines are missing here, because the board dropped them]"


ShowOpenLines = Callable[[list[str]], object]


def ignore_open_lines(_lines: list[str]) -> None:
    """Do nothing with lines that can still change."""


def follow_lines(board: Client, job_id: str, rank: int, show_open: ShowOpenLines = ignore_open_lines) -> Iterator[str]:
    """Yield the log lines of a rank until the job ends, over all attempts from the current attempt on.

    For an ended job, yields the complete log.

    Args:
        show_open: Called with the lines that can still change, for example a progress bar, when they change.

    Raises:
        RefusedError, AwayError
    """
    job = board.job(job_id)
    yield from _read_lines(board, job_id, rank) if job.finished else _follow_job(board, job, rank, show_open)


def follow_attempt(
    board: Client, job_id: str, rank: int, attempt: int, show_open: ShowOpenLines = ignore_open_lines
) -> Iterator[str]:
    """Yield the log lines of one attempt until it ends, each line once.

    Args:
        show_open: As for `follow_lines`.

    Raises:
        RefusedError, AwayError
    """
    next_line = 0
    for event in board.follow_log(job_id, rank, attempt=attempt):
        if event.name == "gap":
            yield GAP
        if event.name != "log":
            continue
        first, lines = event.data["first"], event.data["lines"]
        if event.data["skipped"] and first > next_line:
            yield f"[{event.data['skipped']} log lines are missing here, because they are not stored]"
        yield from lines[max(0, next_line - first) :]
        if first + len(lines) >= next_line:
            next_line = first + len(lines)
            show_open(event.data.get("open", []))  # a board of an older version sends none


def _follow_job(board: Client, job: Job, rank: int, show_open: ShowOpenLines) -> Iterator[str]:
    last_attempt = job.attempt - 1  # the last attempt whose log is complete
    while not job.finished:
        yield from _read_attempts(board, job.id, rank, range(last_attempt + 1, job.attempt))
        last_attempt = job.attempt - 1
        try:
            yield from follow_attempt(board, job.id, rank, job.attempt, show_open)
            last_attempt = job.attempt
        except RefusedError as error:
            if error.status != 409:  # 409: the attempt has no host yet
                raise
        job = board.wait_for(job.id, "started")
    yield from _read_attempts(board, job.id, rank, range(last_attempt + 1, job.attempt + 1))


def _read_attempts(board: Client, job_id: str, rank: int, attempts: Iterable[int]) -> Iterator[str]:
    for attempt in attempts:
        try:
            yield from _read_lines(board, job_id, rank, attempt)
        except RefusedError as error:
            if error.status != 409:  # 409: the attempt ended before it had a host
                raise


def _read_lines(board: Client, job_id: str, rank: int, attempt: int | None = None) -> Iterator[str]:
    return split_lines(board.log(job_id, rank, attempt=attempt, raw=False))


def split_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines in parts of a log."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")


RATE_S = 10  # length of the mean of a rate
CURVE_S = 30  # length of a curve
MAX_DELAY_S = 2  # until ranks have reported the bytes of a second


class JobProgress(NamedTuple):
    """State of a job.

    Args:
        step: Number of completed steps.
        rates: Payload bytes per second of all ranks by axis, mean of RATE_S seconds.
        curves: Payload bytes of each of the last CURVE_S seconds by axis, oldest first.
        loss_source: Where a script reported the loss, such as "log line", or "" for a loss of Meshboard's trainer.
    """

    job: Job
    step: int
    loss: float | None
    step_s: float | None
    rates: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    loss_source: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job.id,
            "status": self.job.status,
            "attempt": self.job.attempt,
            "step": self.step,
            "steps": self.job.steps,
            "loss": self.loss,
            "loss_source": self.loss_source,
            "step_s": self.step_s,
            "bytes_per_s": dict(self.rates),
            "verdict": self.job.verdict,
        }


def follow_progress(board: Client, job: Job) -> Iterator[JobProgress]:
    """Yield the progress of a job after each event, at least once per second, until the job ends.

    Raises:
        RefusedError: With status 400 or 404, the board is too old for live events.
        AwayError
    """
    tracker = ProgressTracker()
    for event in board.events(job.id, live_s=CURVE_S):
        if event.name == "verdict" or (event.name == "state" and _is_new_state(event, job)):
            job = board.job(job.id)
        tracker.add(event)
        yield tracker.get_progress(job)


def _is_new_state(event: Event, job: Job) -> bool:
    # The stream begins with earlier states of the job.
    return (event.data["status"], event.data["attempt"]) != (job.status, job.attempt)


class ProgressTracker:
    """Sums up the events of an attempt."""

    def __init__(self) -> None:
        self._step: Mapping[str, Any] = {}
        self._loss: float | None = None
        self._loss_source = ""
        self._sent: dict[tuple[str, int], int] = {}  # (axis, second) -> bytes
        self._attempt, self._time_s = 0, 0.0

    def add(self, event: Event) -> None:
        if event.name not in ("step", "loss", "traffic"):
            return
        if event.data["attempt"] != self._attempt:
            self._attempt, self._step, self._sent = event.data["attempt"], {}, {}
            self._loss, self._loss_source = None, ""
        if event.name == "step":
            self._step = event.data
            if event.data["loss"] is not None or "not_finite" in event.data:  # not every rank knows the loss
                self._loss = event.data["loss"]
            return
        if event.name == "loss":
            self._loss, self._loss_source = _read_reported(event.data)
            return
        self._time_s = event.data["at"]
        for one in event.data["sent"]:
            key = (one["axis"], one["second"])
            self._sent[key] = self._sent.get(key, 0) + one["bytes"]
        self._sent = {key: sent for key, sent in self._sent.items() if key[1] > self._time_s - 2 * CURVE_S}

    def get_progress(self, job: Job) -> JobProgress:
        curves: dict[str, list[float]] = {}
        # The last complete second. It advances without traffic too, and the rates fall to zero.
        end = max([int(self._time_s) - MAX_DELAY_S, *(second - 1 for _, second in self._sent)])
        for (axis, second), sent in self._sent.items():
            curve = curves.setdefault(axis, [0.0] * CURVE_S)
            if 0 < (place := second - end + CURVE_S) <= CURVE_S:
                curve[place - 1] += sent
        known_s = max(1, min(RATE_S, end + 1 - min((second for _, second in self._sent), default=end)))
        rates = {axis: sum(curve[-known_s:]) / known_s for axis, curve in sorted(curves.items())}
        step, step_s = int(self._step.get("step", 0)), self._step.get("step_s")
        curves = {axis: curves[axis] for axis in rates}
        return JobProgress(job, step, self._loss, step_s, rates, curves, self._loss_source)


def _read_reported(reported: Mapping[str, Any] | None) -> tuple[float | None, str]:
    """Return the loss that a script reported, and its source."""
    if reported is None:
        return None, ""
    loss = reported["loss"]
    return float(reported.get("not_finite") or "nan") if loss is None else loss, reported["source"]


def get_stored_progress(board: Client, job: Job) -> JobProgress:
    """Return the last progress of a job in its stored history.

    Raises:
        RefusedError, AwayError
    """
    loss, source = _read_reported((job.detail.get("diagnosis") or {}).get("loss"))
    empty = JobProgress(job, 0, loss, None, {}, {}, source)
    try:
        stored = [attempt for attempt in board.history(job.id) if attempt["attempt"] == job.attempt]
        first, last = (stored[0]["from"], stored[0]["to"]) if stored else (None, None)
        if first is None or last is None:
            return empty
        progress = _read_history(board, job, first, last)
        return progress._replace(loss=loss, loss_source=source) if source else progress
    except RefusedError as error:
        if error.status == 404:  # no history yet, or a deleted history
            return empty
        raise


def _read_history(board: Client, job: Job, first: float, last: float) -> JobProgress:
    [step] = board.table(job.id, "steps", bins=1)["last_step"] or [0]
    loss = step_s = None
    if step:
        newest = board.table(job.id, "steps", steps=f"{max(step - 1, 1)}-{step}")
        rows = sorted(zip(newest["step"], newest["rank"], newest["loss"], newest["step_s"], strict=True))
        losses = [loss for _, _, loss, _ in rows if loss is not None]
        loss = losses[-1] if losses else None
        step_s = next(step_s for number, _, _, step_s in rows if number == step)
    end = int(last)
    traffic = board.table(job.id, "traffic", **{"from": end - CURVE_S, "to": end, "by": "axis", "bins": CURVE_S})
    curves: dict[str, list[float]] = {}
    for at, axis, num_bytes in zip(traffic["time"], traffic["axis"], traffic["payload_bytes"], strict=True):
        curve = curves.setdefault(axis, [0.0] * CURVE_S)
        curve[min(CURVE_S - 1, int(at - end + CURVE_S))] += num_bytes
    known_s = max(1, min(RATE_S, end - int(first)))
    curves = dict(sorted(curves.items()))
    rates = {axis: sum(curve[-known_s:]) / known_s for axis, curve in curves.items()}
    return JobProgress(job, step, loss, step_s, rates, curves)


def choose_newest(stored: JobProgress, live: JobProgress | None) -> JobProgress:
    """Return the stored progress, with the step of live progress if the history is behind or deleted."""
    if live is None or live.job.attempt != stored.job.attempt or live.step <= stored.step:
        return stored
    loss, source = (stored.loss, stored.loss_source) if stored.loss_source else (live.loss, live.loss_source)
    return stored._replace(step=live.step, loss=loss, step_s=live.step_s, loss_source=source)


def limit_rate(updates: Iterator[JobProgress], interval_s: float) -> Iterator[JobProgress]:
    """Yield updates that are at least `interval_s` apart."""
    next_s = -math.inf
    for progress in updates:
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + interval_s - MAX_JITTER_S
            yield progress
