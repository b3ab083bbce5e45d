"""The `meshboard` command.

Exit codes: 0 all is well; 1 a job did not succeed, or a gate failed; 2 what was asked for makes no sense; 3 the board
cannot be reached or gives no access; 4 the time to wait for a job was up.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from meshboard import access, files, gate, shown
from meshboard.api import AwayError, Client, RefusedError, TimedOutError
from meshboard.gate import report

FAILED, WRONG, AWAY, LATE = 1, 2, 3, 4

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)
AsJson = Annotated[bool, typer.Option("--json", help="what the board says, as JSON on standard output")]
Spec = Annotated[str, typer.Argument(metavar="SPEC", help="YAML or JSON file of a spec; - reads standard input")]
Sets = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="change a field, such as layout.dp=2")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="wait no longer than this")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="the job's id")]


def main() -> None:
    """Every error is one line on standard error, and an exit code."""
    try:
        app()
    except RefusedError as error:
        code = AWAY if error.status in (401, 403) else WRONG
        _stop(str(error) if error.problems else f"refused with {error.status}", code)
    except (AwayError, access.NoAccessError) as error:
        _stop(str(error), AWAY)
    except TimedOutError as error:
        _stop(str(error), LATE)
    except (files.FileError, gate.LimitError, gate.UnknownError) as error:
        _stop(str(error), WRONG)


def _stop(message: str, code: int) -> None:
    print(f"meshboard: {message}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def _board() -> Iterator[Client]:
    found = access.find()
    verify = os.environ.get("MESHBOARD_CA") or True
    with Client(found.url, found.token, verify=verify) as client:
        yield client


def _print(told: Any) -> None:
    print(json.dumps(told, indent=2))


@app.command()
def login(
    url: Annotated[str, typer.Argument(help="the board's address, such as https://board.example")],
    token_file: Annotated[Path | None, typer.Option(help="read the token from a file instead of asking")] = None,
) -> None:
    """Keep a board's address and a REST token for the next commands."""
    try:
        token = token_file.read_text().strip() if token_file else typer.prompt("REST token", hide_input=True).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise files.FileError(f"--token-file: {error}") from None
    with Client(url, token) as client:
        next(client.jobs(limit=1), None)
    print(f"logged in; kept in {access.keep(access.Access(url.rstrip('/'), token))}", file=sys.stderr)


@app.command()
def logout() -> None:
    """Forget what `login` kept."""
    print("forgotten" if access.forget() else "nothing was kept", file=sys.stderr)


@app.command()
def plan(
    spec: Spec,
    changes: Sets = [],  # noqa: B006
    cluster: Annotated[str | None, typer.Option(help="hardware to plan for, by its name on the board")] = None,
    as_json: AsJson = False,
) -> None:
    """What a spec would cost, without running it."""
    with _board() as board:
        told = board.plan(files.spec(spec, changes), cluster)
    if as_json:
        _print(told)
    elif told["estimate"] is not None:
        print(shown.plan_lines(told))
    for problem in told["problems"]:
        print(f"{problem['field']}: {problem['message']}", file=sys.stderr)
    if told["problems"]:
        raise typer.Exit(WRONG)


@app.command()
def search(
    spec: Spec,
    ranks: Annotated[int, typer.Option(min=1, help="how many ranks there are")],
    changes: Sets = [],  # noqa: B006
    cluster: Annotated[str | None, typer.Option(help="hardware to plan for, by its name on the board")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 10,
    as_json: AsJson = False,
) -> None:
    """The fastest layouts that fit: every layout of a model and batch on so many ranks is tried."""
    query: dict[str, Any] = {"spec": files.spec(spec, changes), "ranks": ranks, "limit": limit}
    with _board() as board:
        told = board.search({**query, "cluster": cluster} if cluster else query)
    if as_json:
        _print(told)
        return
    axes = ("tp", "cp", "pp", "dp", "ep")
    rows = [
        [
            " x ".join(f"{axis}{found['layout'][axis]}" for axis in axes if found["layout"][axis] > 1) or "1 rank",
            f"zero-{found['layout']['zero']}",
            found["layout"]["schedule"] if found["layout"]["pp"] > 1 else "-",
            found["layout"]["recompute"],
            found["micro_batch_size"],
            shown.seconds(found["step_s"]),
            shown.size(found["memory_bytes"]),
            "yes" if found["runnable"] else "no",
        ]
        for found in told["best"]
    ]
    print(shown.table(["layout", "", "schedule", "recompute", "micro-batch", "step", "memory", "runs here"], rows))
    print(f"{told['considered']:,} layouts, {told['fitting']:,} fit {told['cluster']['name']}", file=sys.stderr)


@app.command()
def submit(
    spec: Spec,
    changes: Sets = [],  # noqa: B006
    wait: Annotated[bool, typer.Option("--wait", help="until it has ended; exit code 1 unless it succeeded")] = False,
    key: Annotated[str | None, typer.Option(help="the same key and spec give the same job: a build's id")] = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Queue a job; its id is all that goes to standard output."""
    with _board() as board:
        job = board.submit(files.spec(spec, changes), key=key)
        print(f"{job.name}: {board.url}/jobs/{job.id}/", file=sys.stderr)
        if wait:
            job = board.wait(job.id, timeout_s=timeout, each=shown.Progress())
    _print(job.told) if as_json else print(job.id)
    if wait and not job.succeeded:
        raise typer.Exit(FAILED)


@app.command()
def wait(job_id: JobId, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Wait until a job has ended; exit code 1 unless it succeeded."""
    with _board() as board:
        job = board.wait(job_id, timeout_s=timeout, each=shown.Progress())
    if as_json:
        _print(job.told)
    if not job.succeeded:
        raise typer.Exit(FAILED)


@app.command()
def status(
    job_id: Annotated[str | None, typer.Argument(metavar="[JOB]", help="a job's id; without one, the newest")] = None,
    state: Annotated[str | None, typer.Option(help="only jobs in this state")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: AsJson = False,
) -> None:
    """One job, or the newest ones."""
    with _board() as board:
        if job_id is not None:
            job = board.job(job_id)
            _print(job.told) if as_json else print(shown.job_line(job))
            return
        found = list(islice(board.jobs(status=state, limit=limit), limit))
    if as_json:
        _print(found)
        return
    rows = [[brief["id"], brief["status"], brief["name"], brief["owner"], brief["created"]] for brief in found]
    print(shown.table(["id", "status", "name", "owner", "created"], rows))


@app.command()
def cancel(job_ids: Annotated[list[str], typer.Argument(metavar="JOB...")]) -> None:
    """End jobs."""
    with _board() as board:
        for job_id in job_ids:
            print(shown.job_line(board.cancel(job_id)))


@app.command()
def retry(job_id: JobId) -> None:
    """Queue a job that has ended again, as a new attempt of the same spec."""
    with _board() as board:
        print(shown.job_line(board.requeue(job_id)))


@app.command()
def advise(job_id: JobId) -> None:
    """What would have been faster where a finished run ran, as JSON."""
    with _board() as board:
        _print(board.advice(job_id))


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
    with _board() as board:
        runs = [gate.run_of(board.job(job_id).told) for job_id in jobs]
        baselines = [gate.run_of(_told(board, name)) for name in baseline]
    rows = gate.judge(runs, baselines, limits, exact=exact, as_planned=as_planned)
    title = f"gate {' '.join(jobs)}"
    if junit:
        _write(junit, report.junit(rows, title))
    if markdown:
        _write(markdown, report.markdown(rows, title), append=True)
    print(report.as_json(rows) if as_json else report.table(rows))
    if not all(row.ok for row in rows):
        raise typer.Exit(FAILED)


def _told(board: Client, name: str) -> dict[str, Any]:
    if not Path(name).is_file():
        return board.job(name).told
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def meter(context: typer.Context) -> None:
    """Report a run launched here: `meshboard meter -- torchrun ...` hands over to meshboard-meter, which hosts have."""
    program = shutil.which("meshboard-meter")
    if program is None:
        raise files.FileError("meshboard-meter is not here: it comes with a host's packages (docs/howto/elsewhere.md)")
    found = access.find()
    environment = {**os.environ, "MESHBOARD_URL": found.url, "MESHBOARD_TOKEN": found.token}
    os.execve(program, [program, *context.args], environment)  # noqa: S606
