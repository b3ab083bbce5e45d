"""The gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from meshboard import files, gate
from meshboard.api import Client
from meshboard.commands.app import AsJson, app, board
from meshboard.exits import Exit
from meshboard.gate import report


@app.command("gate")
def gate_command(
    jobs: Annotated[
        list[str], typer.Argument(metavar="JOB...", help="finished runs; several of one spec: their median")
    ],
    baseline: Annotated[
        list[str], typer.Option(metavar="JOB|FILE", help="a job, or a file of `status JOB --json`; may be repeated")
    ] = [],  # noqa: B006
    most: Annotated[list[str], typer.Option("--max", metavar="LIMIT", help="step_time=+10%, bytes.tp=+0%, ...")] = [],  # noqa: B006
    least: Annotated[list[str], typer.Option("--min", metavar="LIMIT", help="tokens_per_s=-5%, ...")] = [],  # noqa: B006
    exact: Annotated[
        bool, typer.Option("--exact", help="bytes and calls of each axis and collective are the baseline's")
    ] = False,
    as_planned: Annotated[bool, typer.Option("--as-planned", help="0 B and 0 calls from the prediction")] = False,
    junit: Annotated[Path | None, typer.Option(help="write JUnit XML here")] = None,
    markdown: Annotated[Path | None, typer.Option(help="append a Markdown summary here")] = None,
    as_json: AsJson = False,
) -> None:
    """Hold runs to limits; exit code 1 where one does not hold, or cannot be told.

    Measures: bytes, bytes.AXIS, bytes.AXIS.OP, calls (likewise), step_time, tokens_per_s, peak_memory, loss, loss@STEP.
    A limit is a share of the baseline's (+10%, -5%) or a figure (0.5s, 2GiB).
    """
    limits = [gate.parse(text, "max") for text in most] + [gate.parse(text, "min") for text in least]
    if not limits and not exact and not as_planned:
        raise gate.LimitError("nothing to hold to: give --max, --min, --exact or --as-planned")
    with board() as client:
        runs = [gate.run_of(client.job(job_id).told) for job_id in jobs]
        baselines = [gate.run_of(_told(client, name)) for name in baseline]
    rows = gate.judge(runs, baselines, limits, exact=exact, as_planned=as_planned)
    title = f"gate {' '.join(jobs)}"
    if junit:
        _write(junit, report.junit(rows, title))
    if markdown:
        _write(markdown, report.markdown(rows, title), append=True)
    print(report.as_json(rows) if as_json else report.table(rows))
    if not all(row.ok for row in rows):
        raise typer.Exit(Exit.FAILED)


def _told(client: Client, name: str) -> dict[str, Any]:
    if not Path(name).is_file():
        return client.job(name).told
    try:
        found = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise files.FileError(f"--baseline {name}: {error}") from None
    if not isinstance(found, dict):
        raise files.FileError(f"--baseline {name}: not a job as `meshboard status JOB --json` writes it")
    return found


def _write(file: Path, text: str, *, append: bool = False) -> None:
    try:
        with file.open("a" if append else "w") as out:
            out.write(text)
    except OSError as error:
        raise files.FileError(str(error)) from None
