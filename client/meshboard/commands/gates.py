"""Commands of the gate and its baselines."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import typer

from meshboard import gate
from meshboard.client import Client
from meshboard.commands.app import AsJson, ExitCode, JobIds, app, connect, print_error, print_json, run_for_each
from meshboard.errors import RefusedError, format_error
from meshboard.formatting import format_table, remove_escapes
from meshboard.gate import BaselineRuns, RunMeasures, report
from meshboard.spec_files import SpecFileError

JOB_ID = re.compile(r"[a-z2-7]{10}")
MEASURES: Final = ("bytes", "calls", "step_time", "tokens_per_s", "peak_memory", "loss")
Project = Annotated[str, typer.Option(help="project that stores the baselines")]
Branch = Annotated[str, typer.Argument(metavar="BRANCH", help="name of the git branch")]
baselines = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Set, show, list, and remove the baselines of branches."
)
app.add_typer(baselines, name="baseline")


@app.command("gate")
def run_gate(
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
    is_writable = _write_file("--junit", junit, report.format_unfinished_junit(title))
    limits = [gate.parse_limit(text, "max") for text in most] + [gate.parse_limit(text, "min") for text in least]
    if not limits and not exact and not as_planned:
        raise gate.LimitError("No limit is set. Use --max, --min, --exact, or --as-planned.")
    _check_unique("job", jobs)
    _check_unique("--baseline", baseline)
    began = time.monotonic()
    with connect() as client:
        details = [client.job(job_id).detail for job_id in jobs]
        gate.check_same_spec(details)
        runs = [gate.parse_job(detail) for detail in details]
        found = [_load_baseline(client, project, name) for name in baseline]
    gate.check_same_baselines(found)
    baseline_runs = [run for one in found for run in one.runs]
    results = gate.check_limits(runs, baseline_runs, limits, exact=exact, as_planned=as_planned, sure=sure)
    written = [
        is_writable
        and _write_file("--junit", junit, report.format_junit(results, title, time.monotonic() - began, found)),
        _write_file("--markdown", markdown, report.format_markdown(results, title, found), append=True),
    ]
    print_json(report.to_json(results, found)) if as_json else print(report.format_table(results, found))
    if not all(result.ok for result in results):
        raise typer.Exit(ExitCode.FAILED)
    if not all(written):
        raise typer.Exit(ExitCode.BROKEN)


def _check_unique(what: str, names: list[str]) -> None:
    """Raise LimitError if a run is listed twice, which would make the noise look smaller."""
    for name, count in Counter(names).items():
        if count > 1:
            raise gate.LimitError(f"{what} {name} is listed {count} times. List each run once.")


def _load_baseline(client: Client, project: str, name: str) -> BaselineRuns:
    """Return the baseline that `--baseline` names: a file, a job, or a branch.

    Raises:
        RefusedError, AwayError, SpecFileError, MissingValueError
    """
    if Path(name).is_file():
        return _read_baseline(name)
    if JOB_ID.fullmatch(name):
        try:
            return gate.baseline_from_job(name, client.job(name).detail)
        except RefusedError as error:
            if error.status != 404:
                raise
    try:
        return gate.baseline_from_branch(name, client.baseline(project, name))
    except RefusedError as error:
        if error.status != 404:
            raise
    words = f"No file, visible job, or branch of project {project} with a baseline has this name."
    raise SpecFileError(f"--baseline {name}: {words} Use `meshboard baseline set {name} JOB` to set a baseline.")


def _read_baseline(name: str) -> BaselineRuns:
    try:
        content = json.loads(Path(name).read_bytes())
        if "runs" in content:
            return gate.baseline_from_branch(name, content)
        return gate.baseline_from_job(name, content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        words = (
            "Use a file with the output of `meshboard status JOB --json` or `meshboard baseline show BRANCH --json`."
        )
        raise SpecFileError(f"--baseline {name}: {format_error(error)}. {words}") from None


def _write_file(option: str, file: Path | None, text: str, *, append: bool = False) -> bool:
    """Write the file of an option and return whether it worked. An error does not stop the gate."""
    if file is None:
        return True
    try:
        with file.open("a" if append else "w", encoding="utf-8", errors="replace") as out:
            out.write(text)
    except OSError as error:
        print_error(f"{option} {file}: {format_error(error)}")
        return False
    return True


@baselines.command("set")
def set_baseline(branch: Branch, job_ids: JobIds, project: Project = "default", as_json: AsJson = False) -> None:
    """Add runs to the baseline of a branch. The newest 20 runs measure the noise.

    If the board rejects a run, it still adds the other runs.
    """
    with connect() as client:
        results, exit_code = run_for_each(job_ids, lambda job_id: client.set_baseline(project, branch, job_id))
    refused = [result for result in results if "errors" in result]
    baseline = next((result for result in reversed(results) if "errors" not in result), None)
    if baseline is not None:
        count = len(baseline["runs"])
        print(f"{remove_escapes(branch)}: {count} {'run' if count == 1 else 'runs'}", file=sys.stderr)
        for reason in gate.explain_excluded(branch, baseline):
            print(remove_escapes(reason), file=sys.stderr)
    if as_json:
        content = baseline or {"project": project, "branch": branch}
        print_json({**content, **({"refused": refused} if refused else {})})
    if exit_code:
        raise typer.Exit(exit_code)


@baselines.command()
def show(branch: Branch, project: Project = "default", as_json: AsJson = False) -> None:
    """Show the measurements of the runs of a branch, newest first."""
    with connect() as client:
        content = client.baseline(project, branch)
    if as_json:
        print_json(content)
        return
    baseline = gate.baseline_from_branch(branch, content)
    rows = [
        [run["job"], run["name"], run["by"], run["at"], *(_format_measure(measured, name) for name in MEASURES)]
        for run, measured in zip(content["runs"], baseline.runs, strict=True)
    ]
    print(format_table(["job", "name", "by", "at", *MEASURES], rows))
    for reason in baseline.reasons:
        print(remove_escapes(reason))


def _format_measure(run: RunMeasures, measure: str) -> str:
    try:
        return gate.format_value(run.get_value(measure), gate.get_unit(measure))
    except gate.MissingValueError:
        return "-"


@baselines.command("list")
def list_baselines(project: Project = "default", as_json: AsJson = False) -> None:
    """List the branches with a baseline, each with its newest run."""
    with connect() as client:
        briefs = client.baselines(project)
    if as_json:
        print_json(briefs)
        return
    names: Final = ("branch", "runs", "job", "name", "by", "at")
    print(format_table(names, [[brief[name] for name in names] for brief in briefs]))


@baselines.command()
def rm(branch: Branch, project: Project = "default", as_json: AsJson = False) -> None:
    """Remove the baseline of a branch."""
    with connect() as client:
        client.forget_baseline(project, branch)
    print(f"{remove_escapes(branch)}: baseline removed", file=sys.stderr)
    if as_json:
        print_json({"project": project, "branch": branch})
