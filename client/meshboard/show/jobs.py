"""Jobs as lines, and several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from meshboard.answers import Comparison, JobBrief
from meshboard.job import Job
from meshboard.show.words import clean, seconds, size, table


def line(job: Job) -> str:
    return clean(f"{job.id}  {job.status:<12} {job.name}" + (f"  ({job.reason})" if job.reason else ""))


def detail(job: Job) -> str:
    """The job, and what its diagnosis says where it says something."""
    return line(job) + (f"\n{clean(job.verdict)}" if job.verdict else "")


def briefs(found: Iterable[JobBrief]) -> str:
    names: Final = ("id", "status", "name", "project", "owner", "created")
    rows = ([brief.get(name, "-") for name in names] for brief in found)  # an older board tells no project
    return table(names, rows)


def compared(told: Comparison) -> str:
    """A column a run: where their specs differ, then what they measured. "-" where nothing is kept of one."""
    runs = told["jobs"]
    rows: list[Sequence[object]] = [["id", *(run["job"] for run in runs)]]
    rows += [[one["field"], *("-" if v is None else v for v in one["values"])] for one in told["differences"]]
    curves, parts = [run["curve"] for run in runs], [run["parts"] for run in runs]
    rows += [
        ["steps", *(_last(curve.get("step"), "") for curve in curves)],
        ["final loss", *(_last(curve.get("loss"), ".6g") for curve in curves)],
        ["tokens per second in the last step", *(_last(curve.get("tokens_s"), ",.0f") for curve in curves)],
        ["mean step time", *(_seconds(part.get("step_s") if part else None) for part in parts)],
        ["mean time per step for data", *(_seconds(part.get("data_s") if part else None) for part in parts)],
        ["mean time per step for optimizer", *(_seconds(part.get("optimizer_s") if part else None) for part in parts)],
    ]
    waits = {
        "exposed": [part.get("exposed", {}) if part else {} for part in parts],
        "hidden": [part.get("hidden", {}) if part else {} for part in parts],
    }
    for kind, by_run in waits.items():
        rows += [
            [f"mean time per step for {axis}, {kind}", *(_seconds(by_axis.get(axis)) for by_axis in by_run)]
            for axis in sorted({axis for by_axis in by_run for axis in by_axis})
        ]
    sent = [{(row["axis"], row["op"]): row["payload_bytes"] for row in run["traffic"]} for run in runs]
    for axis, op in sorted({key for one in sent for key in one}):
        rows.append(
            [f"bytes.{axis}.{op}, total", *(_bytes(one.get((axis, op)), bool(one)) for one in sent)],
        )
    return table(["", *(run["name"] for run in runs)], rows)


def _last(column: Sequence[float | None] | None, form: str) -> str:
    return format(column[-1], form) if column and column[-1] is not None else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _bytes(value: int | None, recorded: bool) -> str:
    if not recorded:
        return "-"
    return f"{value or 0:,} B ({size(value or 0)})"
