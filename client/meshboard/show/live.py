"""How a job goes on: a bar or a picture that moves on a terminal, plain lines elsewhere and in a build. All on standard
error, but for `watch`, whose lines are its result."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from meshboard.job import Job
from meshboard.look import RATE_S, Look
from meshboard.show import jobs
from meshboard.show.words import as_json, clean, line_of_log, seconds, size

BLOCKS = " ▁▂▃▄▅▆▇█"


def is_watched(stream: TextIO) -> bool:
    """Whether somebody sees what is drawn over. A build's log keeps each character, also where it has a terminal of its
    own (CI) or wants colours (FORCE_COLOR, which is one to rich)."""
    return stream.isatty() and os.environ.get("CI", "").lower() in ("", "0", "false")


def stderr() -> Console:
    return Console(stderr=True, force_terminal=is_watched(sys.stderr), markup=False, highlight=False)


def say_log(console: Console, label: str, lines: Iterable[str]) -> None:
    """Lines of a log, above a bar that moves there."""
    for line in lines:
        console.print(f"{label}: " * bool(label) + line_of_log(line), soft_wrap=True)


class Waiting:
    """Hears of a job while it is waited for: a bar of its steps on a terminal, a line a change of state elsewhere.

    `label` stands before what would not say whose it is: one of several jobs.
    """

    def __init__(self, label: str = "", console: Console | None = None) -> None:
        self._console = console or stderr()
        self._label, self._last = label, ""
        self._at = (0, 0)  # attempt and step
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True)
        self._bar = bar if self._console.is_terminal else None
        self._task = bar.add_task("", total=None)

    def __enter__(self) -> Waiting:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def shows_steps(self) -> bool:
        return self._bar is not None

    def at(self, seen: Look) -> None:
        """Of two who tell where it is, such as events and the recorder behind them, whoever is further is right."""
        self._at = max(self._at, (seen.job.attempt, seen.step))
        if self._bar is not None:
            self._bar.update(self._task, completed=self._at[1], refresh=True)

    def __call__(self, job: Job) -> None:
        line = jobs.line(job)
        if line != self._last:
            self._last = line
            self._console.print(line, soft_wrap=True)
        if self._bar is not None and not job.finished:
            self._bar.update(self._task, description=f"{self._label} {job.status}".lstrip(), total=job.steps)


class Watching:
    """Shows one look after another: the whole picture anew on a terminal, a line whenever something moved elsewhere."""

    def __init__(self, *, as_json: bool = False, console: Console | None = None) -> None:
        console = console or Console(force_terminal=is_watched(sys.stdout), markup=False, highlight=False)
        moves = console.is_terminal and not as_json
        self._as_json = as_json
        self._live = Live(console=console, auto_refresh=False) if moves else None
        self._last: tuple[str, ...] = ()

    def __enter__(self) -> Watching:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, seen: Look) -> None:
        if self._live is not None:
            self._live.update(picture(seen), refresh=True)
            return
        lines = (as_json(seen.as_json(), indent=None),) if self._as_json else (plain(seen), verdict(seen.job))
        for line in lines:
            if line and line not in self._last:
                print(line, flush=True)
        self._last = lines


def plain(seen: Look) -> str:
    """One line; the verdict is another."""
    parts = [seen.job.status, _steps(seen), _loss(seen), _step_s(seen), _rates(seen)]
    return "  ".join(part for part in parts if part)


def picture(seen: Look) -> Group:
    """The job, where its training is, each axis' traffic with its last seconds as a curve, and the verdict."""
    axes = Table(box=None, pad_edge=False)
    for name in ("axis", "payload", "", f"last {len(next(iter(seen.curves.values()), ()))} s"):
        axes.add_column(name, justify="right" if name == "payload" else "left")
    for axis, rate in seen.rates.items():
        axes.add_row(Text(clean(axis)), f"{size(rate)}/s", "", curve(seen.curves[axis]))
    where = "   ".join(part for part in (_steps(seen), _loss(seen), _step_s(seen)) if part)
    lines = [Text(jobs.line(seen.job)), Text(where), axes if seen.rates else Text("no traffic yet"), Text()]
    lines.append(Text(verdict(seen.job)))
    lines.append(Text(f"payload bytes per second of all ranks, mean of the last {RATE_S} s", style="dim"))
    return Group(*lines)


def verdict(job: Job) -> str:
    """What is said of it, else why it is in its state."""
    return clean(job.verdict or job.reason)


def curve(values: Sequence[float]) -> str:
    """A block a value, as tall as its share of the highest; what is above 0 is seen."""
    most = max(values, default=0.0) or 1.0
    return "".join(BLOCKS[math.ceil(value / most * (len(BLOCKS) - 1))] for value in values)


def _rates(seen: Look) -> str:
    """While it runs: the last seconds of one that has ended are its end's, not its steps'."""
    if seen.job.finished or not seen.rates:
        return ""
    rates = "  ".join(f"{clean(axis)} {size(rate)}/s" for axis, rate in seen.rates.items())
    return f"{rates} (mean of {RATE_S} s)"


def _steps(seen: Look) -> str:
    return f"step {seen.step}" + (f"/{seen.job.steps}" if seen.job.steps else "") if seen.step else ""


def _loss(seen: Look) -> str:
    return "" if seen.loss is None else f"loss {seen.loss:.4g}"


def _step_s(seen: Look) -> str:
    return "" if seen.step_s is None else f"last step {seconds(seen.step_s)}"
