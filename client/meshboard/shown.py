"""Plain lines for a terminal and for CI's log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from meshboard.api import Job

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """Binary units, three digits."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {UNITS[unit]}"


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.4g} s"


def clean(text: object) -> str:
    """Without what a terminal would obey: names and reasons are other people's words."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


def job_line(job: Job) -> str:
    return clean(f"{job.id}  {job.status:<12} {job.name}" + (f"  ({job.reason})" if job.reason else ""))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [[clean(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def plan_lines(plan: Mapping[str, Any]) -> str:
    """What a spec would cost: time by part, memory, payload bytes that the fullest rank sends a step."""
    estimate = plan["estimate"]
    time = estimate["time"]
    parts = "  ".join(f"{part['name']} {seconds(part['seconds'])}" for part in time["parts"])
    fits = "fits" if estimate["fits"] else "does NOT fit"
    sent: dict[str, int] = {}
    for stage in estimate["stages"]:
        for axis, num_bytes in stage["step_bytes"].items():
            sent[axis] = max(sent.get(axis, 0), num_bytes)
    traffic = ", ".join(f"{axis} {num_bytes:,} B" for axis, num_bytes in sent.items() if num_bytes)
    return "\n".join(
        [
            f"step    {seconds(time['step_s'])}, an estimate: {parts}",
            f"memory  {size(estimate['peak_memory_bytes'])} on the fullest rank: {fits} {estimate['cluster']['name']}",
            f"sends   {traffic or 'nothing'} (payload of a step, the fullest rank)",
        ]
    )


class Progress:
    """A job's steps as they come: one line that moves on a terminal, a line at each change of state elsewhere."""

    def __init__(self) -> None:
        self._moves, self._last = sys.stderr.isatty(), ""

    def __call__(self, job: Job) -> None:
        line = job_line(job)
        if line == self._last:
            return
        self._last = line
        end = "\r" if self._moves and not job.finished else "\n"
        print(f"\x1b[2K{line}" if self._moves else line, end=end, file=sys.stderr, flush=True)
