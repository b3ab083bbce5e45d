"""Commands for running jobs: logs and live progress."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from meshboard.client import Client
from meshboard.commands.app import JobId, app, connect
from meshboard.commands.errors import ExitCode
from meshboard.errors import RefusedError
from meshboard.formatting import format_log_line
from meshboard.live_display import WatchDisplay
from meshboard.logs import follow_attempt, follow_lines, split_lines
from meshboard.progress import Progress, follow_progress, get_stored_progress

MAX_JITTER_S = 0.2  # of the events that arrive each second


@app.command()
def logs(
    job_id: JobId,
    rank: Annotated[
        int, typer.Option(min=-65535, max=65535, help="number of the rank, or -1 for the launcher on the first host")
    ] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="follow the log until the job ends")] = False,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="number of the attempt; default is the current attempt")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='print one JSON object per log line: {"rank": 0, "line": "..."}')
    ] = False,
) -> None:
    """Print the complete log of a rank, or follow it."""
    with connect() as client:
        if follow and attempt is None:
            _print_lines(follow_lines(client, job_id, rank), rank, as_json)
        elif follow and attempt is not None:
            _print_lines(follow_attempt(client, job_id, rank, attempt), rank, as_json)
        elif as_json or sys.stdout.isatty():
            _print_lines(split_lines(client.log(job_id, rank, attempt=attempt)), rank, as_json)
        else:
            for part in client.log(job_id, rank, attempt=attempt):
                sys.stdout.buffer.write(part)


def _print_lines(lines: Iterator[str], rank: int, as_json: bool) -> None:
    for line in lines:
        if as_json:
            print(json.dumps({"rank": rank, "line": line}), flush=True)
        else:
            print(format_log_line(line) if sys.stdout.isatty() else line, flush=True)


@app.command()
def watch(
    job_id: JobId,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.5, max=3600, help="time between two updates")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per update")] = False,
) -> None:
    """Show step, loss, traffic per axis, and verdict until the job ends. The exit code is 1 unless it succeeded."""
    with connect() as client:
        succeeded = _watch(client, job_id, every, as_json)
    if not succeeded:
        raise typer.Exit(ExitCode.FAILED)


def _watch(client: Client, job_id: str, interval_s: float, as_json: bool) -> bool:
    job = client.job(job_id)
    newest: Progress | None = None

    def remember(updates: Iterator[Progress]) -> Iterator[Progress]:
        nonlocal newest
        for progress in updates:
            newest = progress
            yield progress

    with WatchDisplay(as_json=as_json) as display:
        while not job.finished:
            try:
                for progress in limit_rate(remember(follow_progress(client, job)), interval_s):
                    display(progress)
            except RefusedError as error:
                if error.status not in (400, 404):
                    raise
                # An older board has no live events, but a history that is some seconds behind.
                display(get_stored_progress(client, job))
                time.sleep(interval_s)
            job = client.job(job_id)
        display(choose_newest(get_stored_progress(client, job), newest))
    return job.succeeded


def choose_newest(stored: Progress, live: Progress | None) -> Progress:
    """Return the stored progress, with the step of live progress if the history is behind or deleted."""
    if live is None or live.job.attempt != stored.job.attempt or live.step <= stored.step:
        return stored
    return stored._replace(step=live.step, loss=live.loss, step_s=live.step_s)


def limit_rate(updates: Iterator[Progress], interval_s: float) -> Iterator[Progress]:
    """Yield updates that are at least `interval_s` apart."""
    next_s = -math.inf
    for progress in updates:
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + interval_s - MAX_JITTER_S
            yield progress
