"""The sentence on the page Compare that names the faster run and the cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.models import Job
from planner.facts.kinds import drop_unused_fields

MIN_DIFFERENCE = 0.03  # relative difference below which two runs count as equally fast
MIN_CAUSE_SHARE = 0.2  # share of the time difference that a part needs to be named as the cause
MAX_NAME_LENGTH = 40  # characters, a longer name is replaced by its letter
TITLES = {
    "compute": "compute time",
    "bubble": "pipeline bubble",
    "data": "data loading",
    "optimizer": "optimizer time",
    "checkpoint": "checkpoint time",
}


class RunSpeed(NamedTuple):
    """The measured speed of a run."""

    name: str
    step_s: float
    tokens: int | None  # per step, or samples per step if `unit` is "samples"
    parts: dict[tuple[str, str], float]  # seconds per step by (kind, name), empty if not measured
    work: dict[str, Any] = {}  # settings that decide the cost of a token, by the name on the page
    unit: str = "tokens"


class Answer(NamedTuple):
    """The sentence, and a note with the numbers behind it."""

    text: str
    note: str


def scale_parts(summary: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> dict[str, Any] | None:
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


def measure_runs(jobs: list[Job], exits: Mapping[str, Any], diagnoses: Mapping[str, Any]) -> list[RunSpeed | None]:
    """Return the measured speed of each job, or None for a job without a measured step time."""
    names = [job.name for job in jobs]
    found: list[RunSpeed | None] = []
    for letter, job in zip("ABCDEF", jobs, strict=False):
        summary = exits.get(job.id, {})
        parts = scale_parts(summary, diagnoses.get(job.id, {}))
        step_s = (summary.get("measured") or {}).get("step_s") or (parts or {}).get("step_s")
        usable = names.count(job.name) == 1 and len(job.name) <= MAX_NAME_LENGTH
        train = drop_unused_fields(job.spec).get("train")
        train = train if isinstance(train, Mapping) else {}
        batch, length = train.get("global_batch"), train.get("seq_len")
        tokens = batch * length if isinstance(batch, int) and isinstance(length, int) else summary.get("samples")
        seconds = {(part["kind"], part["name"]): part["seconds"] for part in (parts or {"parts": []})["parts"]}
        name = job.name if usable else f"run {letter}"
        unit = "samples" if "samples" in summary else "tokens"
        found.append(RunSpeed(name, step_s, tokens, seconds, _describe_work(job, tokens), unit) if step_s else None)
    return found


def _describe_work(job: Job, tokens: int | None) -> dict[str, Any]:
    spec = drop_unused_fields(job.spec)
    train, script = spec.get("train"), spec.get("script")
    if isinstance(script, Mapping):
        # Without the number of samples, other arguments may mean other work per step.
        arguments = {"arguments": script.get("args")} if tokens is None else {}
        return {"script": script.get("module") or script.get("path") or script.get("command"), **arguments}
    return {
        "model": spec.get("model"),
        "sequence length": train.get("seq_len") if isinstance(train, Mapping) else None,
    }


def compute_tokens_per_s(run: RunSpeed | None) -> float | None:
    """Return the tokens per second at the step time of the run."""
    return _compute_rate(run) if run is not None and run.unit == "tokens" else None


def _compute_rate(run: RunSpeed) -> float | None:
    return run.tokens / run.step_s if run.tokens else None


def find_differences(one: RunSpeed, other: RunSpeed) -> list[str]:
    """Return the settings that make the cost of a token different, such as "model"."""
    return [name for name, value in one.work.items() if value != other.work.get(name, value)]


def compute_speedup(run: RunSpeed | None, base: RunSpeed | None) -> float | None:
    """Return how many times as fast the run is per token, or None if the two runs do different work."""
    if run is None or base is None or find_differences(run, base) or _get_unit(run) != _get_unit(base):
        return None
    return _get_cost(base, run.tokens == base.tokens) / _get_cost(run, run.tokens == base.tokens)


def _get_unit(run: RunSpeed) -> str | None:
    return None if run.tokens is None else run.unit


def rank_speeds(runs: list[RunSpeed | None], baseline: int) -> Answer | None:
    """Return the sentence about the fastest run. None if fewer than two runs can be compared.

    Only runs that do the work of the baseline are ranked.
    """
    measured = [run for run in runs if run is not None]
    base = runs[baseline] or next(iter(measured), None)
    if base is None or len(measured) < 2:
        return None
    known = [run for run in measured if compute_speedup(run, base) is not None]
    if len(known) < 2:
        others = [run for run in measured if run is not base]
        if any(_get_unit(run) != _get_unit(base) for run in others):
            return None  # jobs of different kinds
        names = list(dict.fromkeys(name for run in others for name in find_differences(base, run)))
        return Answer(f"The speed is not compared, because the runs differ in {' and '.join(names)}.", "")
    same_work = len({run.tokens for run in known}) == 1
    ranked = sorted(known, key=lambda run: _get_cost(run, same_work))
    fast = ranked[0]
    slow = base if base is not fast else ranked[1]
    ratio = _get_cost(slow, same_work) / _get_cost(fast, same_work)
    note = _format_note(fast, slow, same_work) + _explain_unranked(base, [run for run in measured if run not in known])
    if ratio - 1 < MIN_DIFFERENCE:
        return Answer(_capitalize(f"{fast.name} and {slow.name} are equally fast."), note)
    who = f"{fast.name} is {ratio:.2f} times as fast as {slow.name}"
    if not same_work:
        return Answer(_capitalize(f"{who} in {fast.unit} per second."), note)
    cause = _find_cause(fast, slow)
    return Answer(_capitalize(f"{who}: {cause}." if cause else f"{who}."), note)


def _explain_unranked(base: RunSpeed, others: list[RunSpeed]) -> str:
    """Return a sentence for each run that is not ranked."""
    text = ""
    for run in others:
        names = find_differences(base, run) or ["kind of job"]
        verb = "differ" if len(names) > 1 else "differs"
        text += f" {_capitalize(run.name)} is not ranked, because its {' and '.join(names)} {verb}."
    return text


def _get_cost(run: RunSpeed, same_work: bool) -> float:
    return run.step_s if same_work or not run.tokens else run.step_s / run.tokens


def _format_note(fast: RunSpeed, slow: RunSpeed, same_work: bool) -> str:
    if same_work:
        return f"Step time: {format_seconds(fast.step_s)} compared with {format_seconds(slow.step_s)}."
    rates = [f"{_compute_rate(run) or 0:,.0f}" for run in (fast, slow)]
    unit = fast.unit.capitalize()
    return f"{unit} per second: {rates[0]} compared with {rates[1]}. The runs have different batch sizes."


def _find_cause(fast: RunSpeed, slow: RunSpeed) -> str:
    """Return the part whose time fell most from the slow to the fast run, as a clause."""
    if not fast.parts or not slow.parts:
        return ""
    gains = {key: seconds - fast.parts.get(key, 0.0) for key, seconds in slow.parts.items() if key[0] != "hidden"}
    part = max(gains, key=lambda key: gains[key], default=None)
    if part is None or gains[part] < MIN_CAUSE_SHARE * (slow.step_s - fast.step_s):
        return ""
    before, after = slow.parts[part], fast.parts.get(part, 0.0)
    kind, name = part
    title = f"exposed {name} communication" if kind == "exposed" else TITLES.get(kind, kind)
    return f"{title} takes {format_seconds(after)} instead of {format_seconds(before)} per step"


def format_seconds(seconds: float) -> str:
    """Return seconds with three digits and a unit, in the format of `duration` in js/format.js."""
    if seconds == 0:
        return "0 ms"
    for limit, factor, unit in ((999.5e-6, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{_format_digits(seconds * factor)} {unit}"
    return f"{_format_digits(seconds)} s"


def _format_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("run ") else text
