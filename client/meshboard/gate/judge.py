"""A run beside its limits and its baseline. Pure: what to print is `report`'s."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from meshboard.gate.limits import Limit
from meshboard.gate.measures import Run, UnknownError, unit_of


class Row(NamedTuple):
    """One thing that was checked. Figures are None where `why` says that they could not be had.

    `value` is the median of the runs; `spread` the smallest and largest of the baselines', where there are several.
    """

    what: str
    ok: bool
    value: float | None
    baseline: float | None
    bound: float | None
    unit: str
    why: str
    spread: tuple[float, float] | None = None

    @property
    def change(self) -> float | None:
        """Of the baseline's, 0.1 for ten percent more."""
        if self.value is None or not self.baseline:
            return None
        return self.value / self.baseline - 1


def judge(
    runs: Sequence[Run], baselines: Sequence[Run], limits: Sequence[Limit], *, exact: bool, as_planned: bool
) -> list[Row]:
    """Every row, the failed ones too. `exact`: bytes and calls of each axis and collective are the baseline's.

    Several runs stand for one by their median. A figure within what the baselines themselves span passes a relative
    limit: it is their noise. What cannot be told fails: a check that did not happen is none that held.
    """
    rows = [_limited(runs, baselines, limit) for limit in limits]
    if exact:
        rows += _exactly(runs, baselines)
    if as_planned:
        rows += [_planned(run) for run in runs]
    return rows


def _limited(runs: Sequence[Run], baselines: Sequence[Run], limit: Limit) -> Row:
    what, unit = f"{limit.measure} ({limit.side})", unit_of(limit.measure)
    try:
        value = median(run.value(limit.measure) for run in runs)
        told = [run.value(limit.measure) for run in baselines]
    except UnknownError as error:
        return Row(what, False, None, None, None, unit, str(error))
    if not told:
        if limit.relative:
            return Row(what, False, value, None, None, unit, "a share of a baseline, and no baseline was given")
        return Row(what, limit.holds(value, 0.0), value, None, limit.value, unit, "")
    usual, spread = median(told), (min(told), max(told))
    noise = limit.relative and len(told) > 1 and spread[0] <= value <= spread[1]
    ok = limit.holds(value, usual) or noise
    why = f"within what {len(told)} baselines span" if noise and not limit.holds(value, usual) else ""
    return Row(what, ok, value, usual, limit.bound(usual), unit, why, spread if len(told) > 1 else None)


def _exactly(runs: Sequence[Run], baselines: Sequence[Run]) -> list[Row]:
    if not baselines:
        return [Row("exact", False, None, None, None, "", "no baseline was given")]
    rows = []
    for run in runs:
        for kind in ("bytes", "calls"):
            rows += _same(kind, run, baselines[0])
    return rows


def _same(kind: str, run: Run, baseline: Run) -> list[Row]:
    ours, theirs = (one.sent if kind == "bytes" else one.calls for one in (run, baseline))
    if not ours or not theirs:
        silent = run.name if not ours else baseline.name
        return [Row(f"{kind} (exact)", False, None, None, None, unit_of(kind), f"{silent} tells no {kind}")]
    rows = []
    for axis, op in sorted({*ours, *theirs}):
        value, was = ours.get((axis, op), 0.0), theirs.get((axis, op), 0.0)
        rows.append(Row(f"{kind}.{axis}.{op} (exact)", value == was, value, was, was, unit_of(kind), ""))
    return rows


def _planned(run: Run) -> Row:
    if run.planned is None:
        return Row("as planned", False, None, None, None, "B", f"{run.name} compared nothing with its plan")
    apart, calls = run.planned
    return Row("as planned", run.planned == (0, 0), apart, None, 0.0, "B", f"{calls} calls apart" if calls else "")
