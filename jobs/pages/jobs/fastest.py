"""The sentence on the page Compare that names the faster run and the cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jobs.models import Job
from planner.facts.kinds import fields_read

EQUAL = 0.01  # relative difference below which two runs count as equally fast
MIN_CAUSE = 0.2  # share of the time difference that a part needs to be named as the cause
MAX_NAME = 40  # characters, a longer name is replaced by its letter
TITLES = {
    "compute": "compute time",
    "bubble": "pipeline bubble",
    "data": "data loading",
    "optimizer": "optimizer time",
    "checkpoint": "checkpoint time",
}


class Run(NamedTuple):
    """The measured speed of a run. `parts`: seconds per step by (kind, name), empty if not measured."""

    name: str
    step_s: float
    tokens: int | None
    parts: dict[tuple[str, str], float]


class Answer(NamedTuple):
    """The sentence, and a note with the numbers behind it."""

    text: str
    note: str


def measured_step(summary: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the measured parts of a step. Their sum is the median step time, as on the job page."""
    parts: dict[str, Any] | None = diagnosis.get("measured")
    median = summary.get("measured") or {}
    if parts is None or not median.get("step_s") or not parts["step_s"]:
        return parts
    scale = median["step_s"] / parts["step_s"]
    scaled = [
        {**part, "seconds": part["seconds"] * scale, "waiting_s": part["waiting_s"] * scale} for part in parts["parts"]
    ]
    return {**parts, "step_s": median["step_s"], "steps": median["steps"], "parts": scaled}


def runs_of(jobs: list[Job], exits: Mapping[str, Any], diagnoses: Mapping[str, Any]) -> list[Run | None]:
    """Return the measured speed of each job, or None for a job without a measured step time."""
    names = [job.name for job in jobs]
    found: list[Run | None] = []
    for letter, job in zip("ABCDEF", jobs, strict=False):
        summary = exits.get(job.id, {})
        parts = measured_step(summary, diagnoses.get(job.id, {}))
        step_s = (summary.get("measured") or {}).get("step_s") or (parts or {}).get("step_s")
        usable = names.count(job.name) == 1 and len(job.name) <= MAX_NAME
        train = fields_read(job.spec).get("train")
        tokens = train["global_batch"] * train["seq_len"] if isinstance(train, Mapping) and _sized(train) else None
        seconds = {(part["kind"], part["name"]): part["seconds"] for part in (parts or {"parts": []})["parts"]}
        found.append(Run(job.name if usable else f"run {letter}", step_s, tokens, seconds) if step_s else None)
    return found


def _sized(train: Mapping[str, Any]) -> bool:
    return isinstance(train.get("global_batch"), int) and isinstance(train.get("seq_len"), int)


def answer(runs: list[Run | None], baseline: int) -> Answer | None:
    """Return the sentence about the fastest run. None if fewer than two runs can be compared."""
    base = runs[baseline]
    known = [run for run in runs if run is not None]
    if len(known) < 2 or len({run.tokens is None for run in known}) > 1:
        return None
    same_work = len({run.tokens for run in known}) == 1
    ranked = sorted(known, key=lambda run: _cost(run, same_work))
    fast = ranked[0]
    slow = base if base is not None and base is not fast else ranked[1]
    gain = _cost(slow, same_work) / _cost(fast, same_work) - 1
    times = f"{short(fast.step_s)} and {short(slow.step_s)} per step"
    if gain < EQUAL:
        return Answer(_capital(f"{fast.name} and {slow.name} are equally fast."), _note(fast, slow, same_work))
    who = f"{fast.name} is {gain:.0%} faster than {slow.name}"
    if not same_work:
        return Answer(_capital(f"{who} per token."), _note(fast, slow, same_work))
    cause = _cause(fast, slow)
    return Answer(_capital(f"{who}: {cause or times}."), _note(fast, slow, same_work))


def _cost(run: Run, same_work: bool) -> float:
    return run.step_s if same_work or not run.tokens else run.step_s / run.tokens


def _note(fast: Run, slow: Run, same_work: bool) -> str:
    if same_work:
        return f"Step time: {short(fast.step_s)} compared with {short(slow.step_s)}."
    rates = [f"{(run.tokens or 0) / run.step_s:,.0f}" for run in (fast, slow)]
    return f"Tokens per second: {rates[0]} compared with {rates[1]}. The runs have different batch sizes."


def _cause(fast: Run, slow: Run) -> str:
    """Return the part whose time fell most from the slow to the fast run, as a clause."""
    if not fast.parts or not slow.parts:
        return ""
    gains = {key: seconds - fast.parts.get(key, 0.0) for key, seconds in slow.parts.items() if key[0] != "hidden"}
    part = max(gains, key=lambda key: gains[key], default=None)
    if part is None or gains[part] < MIN_CAUSE * (slow.step_s - fast.step_s):
        return ""
    before, after = slow.parts[part], fast.parts.get(part, 0.0)
    return f"{_title(*part)} takes {short(after)} instead of {short(before)} per step"


def _title(kind: str, name: str) -> str:
    return f"exposed {name} communication" if kind == "exposed" else TITLES.get(kind, kind)


def short(seconds: float) -> str:
    """Return seconds with three digits and a unit, as `duration` in js/format.js does."""
    if seconds == 0:
        return "0 ms"
    for limit, factor, unit in ((999.5e-6, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("run ") else text


def missing_names(jobs: Iterable[Job], runs: Iterable[Run | None]) -> list[str]:
    """Return the names of the jobs without a measured step time."""
    return [job.name for job, run in zip(jobs, runs, strict=True) if run is None]
