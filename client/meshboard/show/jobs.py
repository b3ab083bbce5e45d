"""Jobs as lines, and several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshboard.job import Job
from meshboard.show.words import clean, seconds, size, table


def line(job: Job) -> str:
    return clean(f"{job.id}  {job.status:<12} {job.name}" + (f"  ({job.reason})" if job.reason else ""))


def detail(job: Job) -> str:
    """The job, and what its diagnosis says where it says something."""
    return line(job) + (f"\n{clean(job.verdict)}" if job.verdict else "")


def briefs(found: Iterable[Mapping[str, Any]]) -> str:
    names = ["id", "status", "name", "project", "owner", "created"]
    return table(
        names, ([brief.get(name, "-") for name in names] for brief in found)
    )  # an older board tells no project


def compared(told: Mapping[str, Any]) -> str:
    """A column a run: where their specs differ, then what they measured. "-" where nothing is kept of one."""
    runs = told["jobs"]
    rows: list[Sequence[object]] = [["id", *(run["job"] for run in runs)]]
    rows += [[one["field"], *("-" if v is None else v for v in one["values"])] for one in told["differences"]]
    parts = [run["parts"] or {} for run in runs]
    rows += [
        ["steps", *(_last(run, "step", str) for run in runs)],
        ["loss at the end", *(_last(run, "loss", lambda loss: f"{loss:.6g}") for run in runs)],
        ["tokens a second, last step", *(_last(run, "tokens_s", lambda rate: f"{rate:,.0f}") for run in runs)],
        *([f"{name}, mean of all steps", *(_seconds(part, key) for part in parts)] for name, key in PARTS),
    ]
    for kind in ("exposed", "hidden"):
        axes = sorted({axis for part in parts for axis in part.get(kind, {})})
        rows += [
            [f"{axis} {kind}, mean of all steps", *(_seconds(part.get(kind, {}), axis) for part in parts)]
            for axis in axes
        ]
    sent = [{(row["axis"], row["op"]): row["payload_bytes"] for row in run["traffic"]} for run in runs]
    for axis, op in sorted({key for one in sent for key in one}):
        rows.append(
            [f"bytes.{axis}.{op}, all of it", *(_bytes(one.get((axis, op)), bool(one)) for one in sent)],
        )
    return table(["", *(run["name"] for run in runs)], rows)


PARTS = (("step time", "step_s"), ("data", "data_s"), ("optimizer", "optimizer_s"))


def _last(run: Mapping[str, Any], column: str, words: Any) -> str:
    told = run["curve"].get(column, [])
    return str(words(told[-1])) if told and told[-1] is not None else "-"


def _seconds(part: Mapping[str, float], name: str) -> str:
    return seconds(part[name]) if name in part else "-"


def _bytes(value: int | None, recorded: bool) -> str:
    if not recorded:
        return "-"
    return f"{value or 0:,} B ({size(value or 0)})"
