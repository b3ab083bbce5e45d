"""Live display of a job: a progress bar or a picture on a terminal, plain lines in a file or in CI."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from meshboard.client import Job
from meshboard.follow import RATE_S, JobProgress
from meshboard.formatting import format_bytes, format_json, format_log_line, format_seconds, remove_escapes
from meshboard.text_reports import format_job_line

BLOCKS = " ▁▂▃▄▅▆▇█"


def is_interactive(stream: TextIO) -> bool:
    """Return whether a person sees the stream on a terminal.

    CI logs keep every character, even if CI emulates a terminal or sets FORCE_COLOR.
    """
    return stream.isatty() and os.environ.get("CI", "").lower() in ("", "0", "false")


def make_stderr_console() -> Console:
    return Console(stderr=True, force_terminal=is_interactive(sys.stderr), markup=False, highlight=False)


def print_log(console: Console, label: str, lines: Iterable[str]) -> None:
    """Print log lines above a progress bar."""
    for line in lines:
        console.print(f"{label}: " * bool(label) + format_log_line(line), soft_wrap=True)


class OpenLines:
    """Lines at the end of a log that can still change, on a terminal. Another output shows none."""

    def __init__(self, output: TextIO) -> None:
        self._output, self._num_drawn = output, 0

    def show(self, lines: list[str]) -> None:
        """Draw lines in place of those drawn before."""
        if not self._output.isatty():
            return
        self.erase()
        width = shutil.get_terminal_size().columns - 1
        for line in lines:
            self._output.write(f"{format_log_line(line)[:width]}\n")
        self._output.flush()
        self._num_drawn = len(lines)

    def erase(self) -> None:
        """Remove the lines that are drawn."""
        if self._num_drawn:
            self._output.write(f"\x1b[{self._num_drawn}A\x1b[J")
        self._num_drawn = 0


class WaitDisplay:
    """Display while the command waits for a job: a progress bar on a terminal, else a line per state.

    Args:
        label: Text in front of the bar, which tells several jobs apart.
    """

    def __init__(self, label: str = "", console: Console | None = None) -> None:
        self._console = console or make_stderr_console()
        self._label, self._last_line = label, ""
        self._position = (0, 0)  # attempt and step
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        bar = ProgressBar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True)
        self._bar = bar if self._console.is_terminal else None
        self._task = bar.add_task("", total=None)

    def __enter__(self) -> WaitDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def shows_steps(self) -> bool:
        return self._bar is not None

    def update_step(self, progress: JobProgress) -> None:
        """Move the bar forward. The stored history is behind the events, so the bar never moves back."""
        self._position = max(self._position, (progress.job.attempt, progress.step))
        if self._bar is not None:
            self._bar.update(self._task, completed=self._position[1], refresh=True)

    def __call__(self, job: Job) -> None:
        line = format_job_line(job)
        if line != self._last_line:
            self._last_line = line
            self._console.print(line, soft_wrap=True)
        if self._bar is not None and not job.finished:
            self._bar.update(self._task, description=f"{self._label} {job.status}".lstrip(), total=job.steps)


class WatchDisplay:
    """Display of `watch`: a picture on a terminal, else a line per change."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        console = console or Console(force_terminal=is_interactive(sys.stdout), markup=False, highlight=False)
        self._as_json = as_json
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
        self._last_lines: tuple[str, ...] = ()

    def __enter__(self) -> WatchDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: JobProgress) -> None:
        if self._live is not None:
            self._live.update(render_progress(progress), refresh=True)
            return
        if self._as_json:
            lines: tuple[str, ...] = (format_json(progress.as_json(), indent=None),)
        else:
            lines = (format_progress(progress), format_verdict(progress.job))
        for line in lines:
            if line and line not in self._last_lines:
                print(line, flush=True)
        self._last_lines = lines


def format_progress(progress: JobProgress) -> str:
    """Return status, step, loss, step time, and rates in one line."""
    parts = [progress.job.status, *_get_step_parts(progress), _format_rates(progress)]
    return "  ".join(part for part in parts if part)


def render_progress(progress: JobProgress) -> Group:
    """Return the job, its step, the traffic of each axis with a curve, and the verdict."""
    axes = Table(box=None, pad_edge=False)
    for name in ("axis", "payload", "", f"last {len(next(iter(progress.curves.values()), ()))} s"):
        axes.add_column(name, justify="right" if name == "payload" else "left")
    for axis, rate in progress.rates.items():
        axes.add_row(Text(remove_escapes(axis)), f"{format_bytes(rate)}/s", "", format_curve(progress.curves[axis]))
    steps = Text("   ".join(part for part in _get_step_parts(progress) if part))
    lines = [Text(format_job_line(progress.job)), steps, axes if progress.rates else Text("no traffic yet"), Text()]
    lines.append(Text(format_verdict(progress.job)))
    lines.append(Text(f"payload bytes per second of all ranks, mean of the last {RATE_S} s", style="dim"))
    return Group(*lines)


def format_verdict(job: Job) -> str:
    """Return the verdict, or without one the reason for the state."""
    return remove_escapes(job.verdict or job.reason)


def format_curve(values: Sequence[float]) -> str:
    """Return one block per value, with heights relative to the maximum. A value above 0 is visible."""
    maximum = max(values, default=0.0) or 1.0
    return "".join(BLOCKS[math.ceil(value / maximum * (len(BLOCKS) - 1))] for value in values)


def _format_rates(progress: JobProgress) -> str:
    # The last seconds of an ended job say nothing about its steps.
    if progress.job.finished or not progress.rates:
        return ""
    rates = "  ".join(f"{remove_escapes(axis)} {format_bytes(rate)}/s" for axis, rate in progress.rates.items())
    return f"{rates} (mean of {RATE_S} s)"


def _get_step_parts(progress: JobProgress) -> list[str]:
    total = f"/{progress.job.steps}" if progress.job.steps else ""
    source = f" ({remove_escapes(progress.loss_source)})" if progress.loss_source else ""
    return [
        f"step {progress.step}{total}" if progress.step else "",
        "" if progress.loss is None else f"loss {progress.loss:.4g}{source}",
        "" if progress.step_s is None else f"last step {format_seconds(progress.step_s)}",
    ]
