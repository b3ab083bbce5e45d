"""Jobs as they run: logs, and live traffic."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from meshboard import following
from meshboard.api import Client
from meshboard.commands.app import JobId, app, board
from meshboard.errors import RefusedError
from meshboard.exits import Exit
from meshboard.look import Look, look, looks
from meshboard.show.live import Watching
from meshboard.show.words import line_of_log

SLACK_S = 0.2  # a second is told of a little sooner or later


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
    with board() as client:
        if follow:
            for line in _followed(client, job_id, rank, attempt):
                _print_line(line, rank, as_json)
            return
        rest = b""
        for part in client.log(job_id, rank, attempt=attempt):
            if not as_json and not sys.stdout.isatty():
                sys.stdout.buffer.write(part)
                continue
            *whole, rest = (rest + part).split(b"\n")
            for text in whole:
                _print_line(text.decode(errors="replace"), rank, as_json)
        if rest:
            _print_line(rest.decode(errors="replace"), rank, as_json)


def _followed(client: Client, job_id: str, rank: int, attempt: int | None) -> Iterator[str]:
    if attempt is None:
        return following.lines(client, job_id, rank)
    return following.attempt_lines(client, job_id, rank, attempt)


def _print_line(line: str, rank: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rank": rank, "line": line}), flush=True)
    else:
        print(line_of_log(line) if sys.stdout.isatty() else line, flush=True)


@app.command()
def watch(
    job_id: JobId,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.5, max=3600, help="time between two updates")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object per update")] = False,
) -> None:
    """Show step, loss, traffic per axis, and verdict until the job ends. The exit code is 1 unless it succeeded."""
    with board() as client:
        succeeded = _watch(client, job_id, every, as_json)
    if not succeeded:
        raise typer.Exit(Exit.FAILED)


def _watch(client: Client, job_id: str, every: float, as_json: bool) -> bool:
    job = client.job(job_id)
    newest: Look | None = None

    def noted(found: Iterator[Look]) -> Iterator[Look]:
        nonlocal newest
        for one in found:
            newest = one
            yield one

    with Watching(as_json=as_json) as watching:
        while not job.finished:
            try:
                for seen in spaced(noted(looks(client, job)), every):
                    watching(seen)
            except RefusedError as error:
                if error.status not in (400, 404):
                    raise
                watching(look(client, job))  # an older board: what it keeps, some seconds later
                time.sleep(every)
            job = client.job(job_id)
        watching(further(look(client, job), newest))
    return job.succeeded


def further(kept: Look, newest: Look | None) -> Look:
    """What is kept of a job that has ended, or no longer, or not yet; with the steps that its events told of beyond."""
    if newest is None or newest.job.attempt != kept.job.attempt or newest.step <= kept.step:
        return kept
    return kept._replace(step=newest.step, loss=newest.loss, step_s=newest.step_s)


def spaced(seen: Iterator[Look], every: float) -> Iterator[Look]:
    """Those that come `every` seconds or more behind the one before."""
    due = -math.inf
    for one in seen:
        if time.monotonic() >= due:
            due = time.monotonic() + every - SLACK_S
            yield one
