"""Runs beside their limits and their baseline. Pure: what to print is `report`'s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshboard.gate.figures import figure
from meshboard.gate.limits import Limit
from meshboard.gate.measures import TRAFFIC, Run, UnknownError, unit_of
from meshboard.gate.noise import interval, mean

Verdict = Literal["ok", "unsure", "FAIL"]
MOST_NAMED = 8  # collectives that are named as the reason of a row


class Row(NamedTuple):
    """One thing that was checked. Figures are None where `why` says that they could not be had.

    `value` and `baseline` are means where there are several runs; from `low` to `high` is the 95% interval in which
    noise alone may have put `value`, None where single runs say nothing of their noise.
    """

    what: str
    verdict: Verdict
    value: float | None
    baseline: float | None
    bound: float | None
    unit: str
    why: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def ok(self) -> bool:
        return self.verdict != "FAIL"

    @property
    def change(self) -> float | None:
        """Of the baseline's, 0.1 for ten percent more."""
        if self.value is None or not self.baseline:
            return None
        return (self.value - self.baseline) / abs(self.baseline)


def judge(
    runs: Sequence[Run],
    baselines: Sequence[Run],
    limits: Sequence[Limit],
    *,
    exact: bool = False,
    as_planned: bool = False,
    sure: bool = False,
) -> list[Row]:
    """Every row, the failed ones too; `baselines` are the newest first.

    Bytes and calls are counted: each run is held to the newest baseline. What is measured is held by the mean of the
    runs to that of all baselines, and fails where it is beyond the bound: noise excuses nothing, or few runs would let
    anything pass. Where the mean is within the bound and the interval is not, the row is unsure, which fails where
    `sure`; so does then what has no interval. What cannot be told fails: a check that did not happen is none that
    held. `exact`: bytes and calls of each axis and collective are the baseline's.
    """
    rows = [_row(runs, baselines, limit, sure) for limit in dict.fromkeys(limits)]
    if exact:
        rows += _exactly(runs, baselines)
    if as_planned:
        rows += [_planned(run, _whose(run, runs)) for run in runs]
    return _told_apart(rows)


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Each with a name of its own, as where one measure has two limits: JUnit's readers make one of two alike."""
    seen = Counter[str]()
    found = []
    for row in rows:
        seen[row.what] += 1
        found.append(row if seen[row.what] == 1 else row._replace(what=f"{row.what} {seen[row.what]}"))
    return found


def _whose(run: Run, runs: Sequence[Run]) -> str:
    return f" of {run.name}" if len(runs) > 1 else ""


def _row(runs: Sequence[Run], baselines: Sequence[Run], limit: Limit, sure: bool) -> Row:
    what, unit = f"{limit.measure} ({limit.side})", unit_of(limit.measure)
    try:
        if TRAFFIC.fullmatch(limit.measure):
            return _counted(what, runs, baselines[:1], limit)
        values = [run.value(limit.measure) for run in runs]
        told = [run.value(limit.measure) for run in baselines]
    except UnknownError as error:
        return Row(what, "FAIL", None, None, None, unit, str(error))
    value = mean(values)
    if limit.relative and not told:
        return Row(what, "FAIL", value, None, None, unit, "A relative limit needs a baseline. Set --baseline.")
    usual = mean(told) if told else None
    held_to = told if limit.relative else ()
    row = Row(what, "FAIL", value, usual, limit.bound(usual or 0.0), unit)
    return _decided(row, limit.holds(value, usual or 0.0), sure, interval(values, held_to), _runs(values, held_to))


def _decided(row: Row, held: bool, sure: bool, noise: tuple[float, float] | None, runs: str) -> Row:
    """The row with its verdict, and what noise has to do with it."""
    if noise is None:
        words = (
            f"The noise of {runs} is unknown. --sure needs two runs or two baseline runs, with values above 0."
            if held and sure
            else ""
        )
        return row._replace(verdict="ok" if held and not sure else "FAIL", why=words)
    assert row.bound is not None, "it was held to one"
    low, high = noise
    is_clear = low == high or not low <= row.bound <= high
    row = row._replace(low=low, high=high)
    if is_clear:
        return row._replace(verdict="ok" if held else "FAIL")
    if not held:
        return row._replace(
            why=f"The mean exceeds the limit by less than the noise of {runs}. Submit more runs to decide."
        )
    words = f"The mean is within the limit, but the margin is smaller than the noise of {runs}."
    return row._replace(verdict="FAIL" if sure else "unsure", why=words)


def _runs(values: Sequence[float], told: Sequence[float]) -> str:
    runs = f"{len(values)} run{'s' if len(values) > 1 else ''}"
    baselines = f"{len(told)} baseline run{'s' if len(told) > 1 else ''}"
    return f"{runs} and {baselines}" if told else runs


def _counted(what: str, runs: Sequence[Run], newest: Sequence[Run], limit: Limit) -> Row:
    """The run that is furthest off, and which collectives are not as they were. Raises UnknownError."""
    kind, *wanted = limit.measure.split(".")
    unit = unit_of(limit.measure)
    worst = (max if limit.side == "max" else min)(runs, key=lambda run: run.value(limit.measure))
    value = worst.value(limit.measure)
    if limit.relative and not newest:
        return Row(what, "FAIL", value, None, None, unit, "A relative limit needs a baseline. Set --baseline.")
    known = {key for run in (*runs, *newest) for key in run.table(kind)}
    if not any(list(key)[: len(wanted)] == wanted for key in known):
        there = ", ".join(sorted({".".join(key[: len(wanted)]) for key in known})) or "none"
        return Row(
            what, "FAIL", None, None, None, unit, f"No run has traffic of {'.'.join(wanted)}. Use one of: {there}."
        )
    was = newest[0].value(limit.measure) if newest else None
    held = limit.holds(value, was or 0.0)
    why = "" if held or not newest else _moved(kind, wanted, worst, newest[0])
    if not held and len(runs) > 1:
        why = f"{worst.name}: {why}" if why else worst.name
    return Row(what, "ok" if held else "FAIL", value, was, limit.bound(was or 0.0), unit, why)


def _moved(kind: str, wanted: Sequence[str], run: Run, baseline: Run) -> str:
    """Axis, collective and by how much, the largest first."""
    ours, theirs = run.table(kind), baseline.table(kind)
    keys = [key for key in sorted({*ours, *theirs}) if list(key)[: len(wanted)] == list(wanted)]
    by = {key: ours.get(key, 0.0) - theirs.get(key, 0.0) for key in keys}
    moved = sorted((key for key in keys if by[key]), key=lambda key: -abs(by[key]))
    named = [f"{axis} {op} {_moved_by(by[axis, op], kind)}" for axis, op in moved[:MOST_NAMED]]
    return ", ".join(named) + (f" and {len(moved) - MOST_NAMED} more" if len(moved) > MOST_NAMED else "")


def _moved_by(value: float, kind: str) -> str:
    return figure(value, unit_of(kind), "+") + (" calls" if kind == "calls" else "")


def _exactly(runs: Sequence[Run], baselines: Sequence[Run]) -> list[Row]:
    if not baselines:
        return [Row("exact", "FAIL", None, None, None, "", "--exact needs a baseline. Set --baseline.")]
    rows = []
    for run in runs:
        for kind in ("bytes", "calls"):
            rows += _same(kind, run, baselines[0], _whose(run, runs))
    return rows


def _same(kind: str, run: Run, baseline: Run, whose: str) -> list[Row]:
    ours, theirs = run.table(kind), baseline.table(kind)
    unit = unit_of(kind)
    if not ours or not theirs:
        silent = run if not ours else baseline
        why = silent.silence(kind, silent.no_sent)
        return [Row(f"{kind} (exact){whose}", "FAIL", None, None, None, unit, why)]
    rows = []
    for axis, op in sorted({*ours, *theirs}):
        value, was = ours.get((axis, op), 0.0), theirs.get((axis, op), 0.0)
        verdict: Verdict = "ok" if value == was else "FAIL"
        rows.append(Row(f"{kind}.{axis}.{op} (exact){whose}", verdict, value, was, was, unit))
    return rows


def _planned(run: Run, whose: str) -> Row:
    if run.planned is None:
        return Row(
            f"as planned{whose}",
            "FAIL",
            None,
            None,
            None,
            "B",
            f"Some ranks of {run.name} have no traffic check.",
        )
    apart, calls = run.planned
    verdict: Verdict = "ok" if run.planned == (0, 0) else "FAIL"
    return Row(f"as planned{whose}", verdict, apart, None, 0.0, "B", f"{calls} calls differ" if calls else "")
