"""The gate, and the baselines that a board keeps for it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import typer

from meshboard import files, gate
from meshboard.api import Client
from meshboard.commands.app import AsJson, JobIds, app, board, print_json
from meshboard.commands.refusals import each, say
from meshboard.errors import RefusedError, why
from meshboard.exits import Exit
from meshboard.gate import Baseline, Run, report
from meshboard.show.words import clean, table

JOB_ID = re.compile(r"[a-z2-7]{10}")
Project = Annotated[str, typer.Option(help="project that stores the baselines")]
Branch = Annotated[str, typer.Argument(metavar="BRANCH", help="name of the git branch")]
baselines = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Set, show, list, and remove the baselines of branches."
)
app.add_typer(baselines, name="baseline")


@app.command("gate")
def gate_command(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB...", help="finished jobs to check; several jobs of one spec also measure the noise"
        ),
    ],
    baseline: Annotated[
        list[str],
        typer.Option(
            metavar="BRANCH|JOB|FILE", help="branch, job id, or file with the output of --json; can be repeated"
        ),
    ] = [],  # noqa: B006
    project: Project = "default",
    most: Annotated[list[str], typer.Option("--max", metavar="LIMIT", help="step_time=+10%, bytes.tp=+0%, ...")] = [],  # noqa: B006
    least: Annotated[list[str], typer.Option("--min", metavar="LIMIT", help="tokens_per_s=-5%, ...")] = [],  # noqa: B006
    exact: Annotated[
        bool,
        typer.Option("--exact", help="fail unless the bytes and calls of each axis and collective equal the baseline"),
    ] = False,
    as_planned: Annotated[
        bool, typer.Option("--as-planned", help="fail unless the measured traffic equals the predicted traffic")
    ] = False,
    sure: Annotated[
        bool,
        typer.Option("--sure", help="fail also if only the mean, but not its confidence interval, is within a limit"),
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="write the result as JUnit XML to this file")] = None,
    markdown: Annotated[Path | None, typer.Option(help="append the result as a Markdown table to this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished jobs with limits. The exit code is 1 if a limit fails or has no result.

    Measures: bytes, bytes.AXIS, bytes.AXIS.OP, calls, calls.AXIS, calls.AXIS.OP, step_time, tokens_per_s, peak_memory,
    loss, loss@STEP.
    A limit is relative to the baseline (+10%, -5%) or a value (0.5s, 2GiB).
    For several runs, the gate checks their mean.
    """
    title = f"gate {' '.join(jobs)}"
    writable = _written("--junit", junit, report.junit_without_verdict(title))
    limits = [gate.parse(text, "max") for text in most] + [gate.parse(text, "min") for text in least]
    if not limits and not exact and not as_planned:
        raise gate.LimitError("No limit is set. Use --max, --min, --exact, or --as-planned.")
    _once("job", jobs)
    _once("--baseline", baseline)
    began = time.monotonic()
    with board() as client:
        told = [client.job(job_id).told for job_id in jobs]
        gate.check_same(told)
        runs = [gate.run_of(one) for one in told]
        held_to = [_baseline(client, project, name) for name in baseline]
    gate.check_alike(held_to)
    against = [run for one in held_to for run in one.runs]
    rows = gate.judge(runs, against, limits, exact=exact, as_planned=as_planned, sure=sure)
    written = [
        writable and _written("--junit", junit, report.junit(rows, title, time.monotonic() - began, held_to)),
        _written("--markdown", markdown, report.markdown(rows, title, held_to), append=True),
    ]
    print_json(report.as_json(rows, held_to)) if as_json else print(report.table(rows, held_to))
    if not all(row.ok for row in rows):
        raise typer.Exit(Exit.FAILED)
    if not all(written):
        raise typer.Exit(Exit.BROKEN)


def _once(what: str, names: list[str]) -> None:
    """Raises gate.LimitError: one run counted twice makes the noise look smaller than it is."""
    for name, times in Counter(names).items():
        if times > 1:
            raise gate.LimitError(f"{what} {name} is listed {times} times. List each run once.")


def _baseline(client: Client, project: str, name: str) -> Baseline:
    """What `--baseline` names.

    Raises:
        RefusedError, AwayError, files.FileError, gate.UnknownError
    """
    if Path(name).is_file():
        return _of_file(name)
    if JOB_ID.fullmatch(name):
        try:
            return gate.of_job(name, client.job(name).told)
        except RefusedError as error:
            if error.status != 404:
                raise
    try:
        return gate.of_branch(name, client.baseline(project, name))
    except RefusedError as error:
        if error.status != 404:
            raise
    words = f"No file, visible job, or branch of project {project} with a baseline has this name."
    raise files.FileError(f"--baseline {name}: {words} Use `meshboard baseline set {name} JOB` to set a baseline.")


def _of_file(name: str) -> Baseline:
    try:
        found = json.loads(Path(name).read_bytes())
        return gate.of_branch(name, found) if "runs" in found else gate.of_job(name, found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        words = (
            "Use a file with the output of `meshboard status JOB --json` or `meshboard baseline show BRANCH --json`."
        )
        raise files.FileError(f"--baseline {name}: {why(error)}. {words}") from None


def _written(option: str, file: Path | None, text: str, *, append: bool = False) -> bool:
    """Whether it is where it was asked for; else that is said, and keeps nobody from the verdict."""
    if file is None:
        return True
    try:
        with file.open("a" if append else "w", encoding="utf-8", errors="replace") as out:
            out.write(text)
    except OSError as error:
        say(f"{option} {file}: {why(error)}")
        return False
    return True


@baselines.command("set")
def set_baseline(branch: Branch, job_ids: JobIds, project: Project = "default", as_json: AsJson = False) -> None:
    """Add runs to the baseline of a branch. The newest 20 runs measure the noise.

    If the board rejects a run, it still adds the other runs.
    """
    with board() as client:
        found, worst = each(job_ids, lambda job_id: client.set_baseline(project, branch, job_id))
    refused = [one for one in found if "errors" in one]
    told = next((one for one in reversed(found) if "errors" not in one), None)
    if told is not None:
        held = len(told["runs"])
        print(f"{clean(branch)}: {held} {'run' if held == 1 else 'runs'}", file=sys.stderr)
        for line in gate.why_aside(branch, told):
            print(clean(line), file=sys.stderr)
    if as_json:
        print_json({**(told or {"project": project, "branch": branch}), **({"refused": refused} if refused else {})})
    if worst:
        raise typer.Exit(worst)


@baselines.command()
def show(branch: Branch, project: Project = "default", as_json: AsJson = False) -> None:
    """Show the measurements of the runs of a branch, newest first."""
    with board() as client:
        told = client.baseline(project, branch)
    if as_json:
        print_json(told)
        return
    kept = gate.of_branch(branch, told)
    measures = ("bytes", "calls", "step_time", "tokens_per_s", "peak_memory", "loss")
    rows = [
        [run["job"], run["name"], run["by"], run["at"], *(_figure(one, name) for name in measures)]
        for run, one in zip(told["runs"], kept.runs, strict=True)
    ]
    print(table(["job", "name", "by", "at", *measures], rows))
    for line in kept.why:
        print(clean(line))


def _figure(run: Run, measure: str) -> str:
    try:
        return gate.figure(run.value(measure), gate.unit_of(measure))
    except gate.UnknownError:
        return "-"


@baselines.command("list")
def list_baselines(project: Project = "default", as_json: AsJson = False) -> None:
    """List the branches with a baseline, each with its newest run."""
    with board() as client:
        told = client.baselines(project)
    if as_json:
        print_json(told)
        return
    names: Final = ("branch", "runs", "job", "name", "by", "at")
    print(table(names, [[row[name] for name in names] for row in told]))


@baselines.command()
def rm(branch: Branch, project: Project = "default", as_json: AsJson = False) -> None:
    """Remove the baseline of a branch."""
    with board() as client:
        client.forget_baseline(project, branch)
    print(f"{clean(branch)}: baseline removed", file=sys.stderr)
    if as_json:
        print_json({"project": project, "branch": branch})
