"""Commands that plan, submit, manage, and follow jobs."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console

from meshboard import text_reports
from meshboard.client import Client, Job, check_key
from meshboard.commands.app import (
    AsJson,
    Cluster,
    ConfigFile,
    ExitCode,
    JobId,
    JobIds,
    LayoutFile,
    MeasuredSteps,
    OptionalSpec,
    Ranks,
    Sets,
    Timeout,
    app,
    connect,
    print_json,
    run_for_each,
)
from meshboard.errors import AwayError, RefusedError, WrongError, format_error, format_problem
from meshboard.follow import (
    JobProgress,
    choose_newest,
    follow_attempt,
    follow_lines,
    follow_progress,
    get_stored_progress,
    limit_rate,
    split_lines,
)
from meshboard.formatting import format_log_line, remove_escapes
from meshboard.live_display import OpenLines, WaitDisplay, WatchDisplay, make_stderr_console, print_log
from meshboard.packing import PackedScript, pack
from meshboard.spec_files import change_spec, read_file, read_measured_step, read_spec

MIN_COMPARED_JOBS, MAX_COMPARED_JOBS = 2, 6  # limits of the board
MAX_NAMED_SCRIPTS = 5  # in an error
LOG_END_S = 10.0  # for the rest of a log after the end of its job
SEVERAL = "separate values with commas, or repeat the option"
STATE_HELP = f"list only jobs with this status, or all jobs that have not ended (active); {SEVERAL}"
KIND_HELP = f"list only jobs of this kind: train, script, dry_run, lab, calibrate; {SEVERAL}"
TAG_HELP = f"list only jobs that have all these tags; {SEVERAL}"


@app.command()
def submit(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC]",
            help="YAML or JSON file with the job spec, or - for standard input; optional with --upload",
        ),
    ] = None,
    changes: Sets = [],  # noqa: B006
    upload: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="folder, script, or git repository (URL@COMMIT) to upload and run; files in .gitignore and "
            ".meshboardignore are left out",
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="wait until the job ends; the exit code is 1 unless the job succeeded")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="wait, and print the log of rank 0 to standard error")
    ] = False,
    runs: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="number of jobs to submit with this spec, so that `gate` can measure the noise"
        ),
    ] = 1,
    key: Annotated[
        str | None, typer.Option(help="id of the build; submitting this spec with this key again returns the same job")
    ] = None,
    allow_unfit: Annotated[
        bool, typer.Option("--allow-unfit", help="submit the job even if it cannot fit in memory")
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job and print its id. For several jobs, print one id per line."""
    if timeout is not None and not (wait or follow):
        raise WrongError("--timeout needs --wait or --follow.", "--timeout")
    if spec is None and upload is None:
        raise WrongError("Name a file with the job spec, or use --upload PATH.", "spec")
    content, keys = read_spec(spec, changes), _make_keys(key, runs)
    packed = None if upload is None else pack(upload)
    jobs: dict[str, Job] = {}
    with connect() as client, _print_jobs_at_end(jobs, as_json, is_list=runs > 1):
        if packed is not None:
            _upload(client, packed, content)
        for one in keys:
            job = client.submit(content, key=one, allow_unfit=allow_unfit)
            jobs[job.id] = job
            if not as_json:
                print(job.id, flush=True)  # so that a killed build knows its jobs
            note = " already exists, because this spec was submitted with this key before"
            url = f"{client.url}/jobs/{job.id}/{note if job.already_existed else ''}"
            print(f"{remove_escapes(job.name)}: {url}", file=sys.stderr)
            if layout := text_reports.format_chosen_layout(job.detail):
                print(layout, file=sys.stderr)
        if wait or follow:
            _wait_for_all(client, jobs, timeout, prints_logs=follow)
    if (wait or follow) and not all(job.succeeded for job in jobs.values()):
        raise typer.Exit(ExitCode.FAILED)


def _upload(client: Client, packed: PackedScript, spec: dict[str, Any]) -> None:
    """Upload a packed script, print what it has, and complete the spec of its job."""
    for note in packed.notes:
        print(f"Left out: {remove_escapes(note)}", file=sys.stderr)
    uploaded = client.upload(packed.name, packed.content)
    print(text_reports.format_upload(packed.files, uploaded), file=sys.stderr)
    spec.setdefault("kind", "script")
    spec.setdefault("name", packed.name.removesuffix(".tar.gz"))
    script = spec.setdefault("script", {})
    if not isinstance(script, dict):
        raise WrongError("`script` is not a mapping. Use fields such as script.path.", "script")
    script["upload"] = uploaded["sha256"]
    if not {"path", "module", "command"} & set(script):
        if len(uploaded["scripts"]) != 1:
            names = ", ".join(uploaded["scripts"][:MAX_NAMED_SCRIPTS]) or "none"
            raise WrongError(f"Use --set script.path=FILE. The Python files of the upload are: {names}.", "script.path")
        script["path"] = uploaded["scripts"][0]


def _make_keys(key: str | None, runs: int) -> list[str | None]:
    """Return a key per job, because the board returns one job for equal keys."""
    if key is None:
        return [None] * runs
    check_key(key, "--key")
    return [key] if runs == 1 else [check_key(f"{key}-{number}", "--key") for number in range(1, runs + 1)]


@contextmanager
def _print_jobs_at_end(jobs: dict[str, Job], as_json: bool, *, is_list: bool = False) -> Iterator[None]:
    """Print the last state of the jobs as JSON, even if the wait for them fails or is interrupted."""
    try:
        yield
    finally:
        if as_json and jobs:
            details = [job.detail for job in jobs.values()]
            print_json(details if is_list else details[0])


def _wait_for_all(client: Client, jobs: dict[str, Job], timeout_s: float | None, *, prints_logs: bool) -> None:
    began, console = time.monotonic(), make_stderr_console()
    labels = {job_id: job_id if len(jobs) > 1 else "" for job_id in jobs}
    threads = []
    if prints_logs:
        for job_id, label in labels.items():
            thread = threading.Thread(target=_print_log, args=(client, job_id, label, console), daemon=True)
            thread.start()
            threads.append(thread)
    for job_id, label in labels.items():
        _wait(client, job_id, jobs, WaitDisplay(label, console), timeout_s, began)
    for thread in threads:
        thread.join(LOG_END_S)


def _print_log(client: Client, job_id: str, label: str, console: Console) -> None:
    """Print the log of rank 0. An error of the log does not end the wait for the job."""
    try:
        print_log(console, label, follow_lines(client, job_id, rank=0))
    except (RefusedError, AwayError) as error:
        print_log(console, label, [f"[cannot follow the log: {error}]"])
    except RuntimeError:
        return  # the client is closed, because the wait ended


@app.command()
def wait(job_id: JobId, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Wait until a job ends. Exit code 1 unless it succeeded."""
    jobs: dict[str, Job] = {}
    with connect() as client, _print_jobs_at_end(jobs, as_json):
        _wait(client, job_id, jobs, WaitDisplay(), timeout, time.monotonic())
    if not jobs[job_id].succeeded:
        raise typer.Exit(ExitCode.FAILED)


def _wait(
    client: Client, job_id: str, jobs: dict[str, Job], display: WaitDisplay, timeout_s: float | None, since: float
) -> None:
    """Wait for a job, and store its last state in `jobs`."""
    with display:

        def update(job: Job) -> None:
            jobs[job_id] = job
            display(job)
            if display.shows_steps and not job.finished:
                display.update_step(get_stored_progress(client, job))

        if display.shows_steps:
            threading.Thread(target=_follow_steps, args=(client, job_id, display), daemon=True).start()
        client.wait(job_id, timeout_s=timeout_s, since=since, each=update)


def _follow_steps(client: Client, job_id: str, display: WaitDisplay) -> None:
    # RuntimeError: the client is closed, because the wait ended. The stored history shows steps without events too.
    with suppress(RefusedError, AwayError, RuntimeError):
        for progress in follow_progress(client, client.job(job_id)):
            display.update_step(progress)


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="job id; without it, list the newest jobs")
    ] = None,
    state: Annotated[list[str] | None, typer.Option(help=STATE_HELP)] = None,
    kind: Annotated[list[str] | None, typer.Option(help=KIND_HELP)] = None,
    project: Annotated[str | None, typer.Option(help="list only jobs of this project")] = None,
    tag: Annotated[list[str] | None, typer.Option(help=TAG_HELP)] = None,
    owner: Annotated[str | None, typer.Option(help="list only jobs of this user")] = None,
    mine: Annotated[bool, typer.Option("--mine", help="list only your jobs")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a job with its verdict, or list the newest jobs."""
    filters = {"status": state or None, "kind": kind or None, "project": project, "tag": tag or None, "owner": owner}
    filters["whose"] = "mine" if mine else None
    if job_id is not None and any(value is not None for value in filters.values()):
        options = "--state, --kind, --project, --tag, --owner and --mine"
        raise WrongError(f"{options} work only without a job id. Omit these options, or omit {job_id}.")
    with connect() as client:
        if job_id is not None:
            job = client.job(job_id)
            print_json(job.detail) if as_json else print(text_reports.format_job(job))
            return
        briefs = list(islice(client.jobs(**filters, limit=limit), limit))
    print_json(briefs) if as_json else print(text_reports.format_jobs(briefs))


@app.command()
def cancel(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Cancel jobs. If one job cannot be cancelled, the others still are."""
    with connect() as client:
        _act_on_jobs(job_ids, client.cancel, as_json)


@app.command()
def retry(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Retry ended jobs. Each gets a new attempt with the same spec."""
    with connect() as client:
        _act_on_jobs(job_ids, client.requeue, as_json)


def _act_on_jobs(job_ids: list[str], act: Callable[[str], Job], as_json: bool) -> None:
    results, exit_code = run_for_each(job_ids, lambda job_id: act(job_id).detail)
    if as_json:
        print_json(results)
    else:
        for result in results:
            if "errors" not in result:
                print(text_reports.format_job_line(Job(result)))
    if exit_code:
        raise typer.Exit(exit_code)


@app.command()
def compare(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Compare the specs and measurements of two to six jobs."""
    distinct = set(job_ids)
    if not MIN_COMPARED_JOBS <= len(distinct) <= MAX_COMPARED_JOBS or len(distinct) < len(job_ids):
        words = f"Use {MIN_COMPARED_JOBS} to {MAX_COMPARED_JOBS} different job ids, separated by spaces"
        raise WrongError(f"{words}, not {' '.join(job_ids)}.", "jobs")
    with connect() as client:
        comparison = client.compare(job_ids)
    print_json(comparison) if as_json else print(text_reports.format_comparison(comparison))


@app.command()
def plan(
    spec: OptionalSpec = None,
    changes: Sets = [],  # noqa: B006
    config: ConfigFile = None,
    layout: LayoutFile = None,
    ranks: Ranks = None,
    cluster: Cluster = None,
    measured: MeasuredSteps = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Predict the memory, traffic, and step time of a spec."""
    if ranks is not None and layout is None:
        raise WrongError("--ranks needs --layout.", "--ranks")
    with connect() as client:
        draft = _read_draft(client, spec, config, changes, layout, ranks)
        content = client.plan({**draft, **_read_measured_steps(measured)}, cluster)
    if as_json:
        print_json(content)
    elif (estimate := content["estimate"]) is not None:
        lines = (text_reports.format_chosen_layout(content), text_reports.format_plan(estimate))
        print(*filter(None, lines), sep="\n")
    elif not content["problems"]:
        print("Meshboard has no estimate for jobs of this kind.")
    for problem in content["problems"]:
        print(remove_escapes(format_problem(problem["field"], problem["message"])), file=sys.stderr)
    if content["problems"]:
        raise typer.Exit(ExitCode.WRONG)


def _read_measured_steps(measured: list[str]) -> dict[str, Any]:
    """Return the field of a request with the measured steps, or {} without any."""
    return {"measured_steps": [read_measured_step(text) for text in measured]} if measured else {}


def _read_draft(
    client: Client,
    spec: str | None,
    config: str | None,
    changes: list[str],
    layout: str | None = None,
    ranks: int | None = None,
) -> dict[str, Any]:
    """Return the spec to plan. A config.json replaces the model of the spec, and a layout file its layout.

    Without a spec, the plan is for unknown software on GPUs in bf16.
    """
    if config is None and layout is None:
        if spec is None:
            raise WrongError("SPEC is missing. Add a spec, or use --config FILE or --layout FILE.", "spec")
        return read_spec(spec, changes)
    train: dict[str, Any] = {"precision": "bf16", "seq_len": 2048}
    draft = read_spec(spec) if spec else {"resources": {"device": "cuda", "stack": "unknown"}, "train": train}
    if layout is not None:
        _import_layout(client, draft, layout, ranks)
    if config is not None:
        found = client.import_model(read_spec(config))
        _print_notes([f"{found['parameters']:,} parameters", *found["notes"]])
        draft |= {"model": found["model"]}
        if spec is None and layout is None:
            train["seq_len"] = min(2048, found["model"]["max_seq_len"])
    change_spec(draft, changes)
    return draft


def _import_layout(client: Client, draft: dict[str, Any], name: str, ranks: int | None) -> None:
    """Replace the layout, and the settings of training and resources that a layout file has."""
    try:
        text = read_file(name).decode(errors="replace")
    except OSError as error:
        raise WrongError(f"{name}: {format_error(error)}", "--layout") from None
    found = client.import_layout(text, ranks)
    lines = [f"Layout of {found['tool']} for {found['ranks']} ranks.", *found["notes"], *found["assumed"]]
    if found["not_understood"]:
        lines.append(f"Not understood: {', '.join(found['not_understood'])}.")
    _print_notes(lines)
    imported: dict[str, Any] = {**found["spec"]}
    for section in ("train", "resources"):
        draft[section] = {**(draft.get(section) or {}), **imported[section]}
    draft |= {part: imported[part] for part in ("layout", "model") if part in imported}


def _print_notes(lines: list[str]) -> None:
    print(*map(remove_escapes, lines), sep="\n", file=sys.stderr)


@app.command()
def search(
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")],
    spec: OptionalSpec = None,
    changes: Sets = [],  # noqa: B006
    config: ConfigFile = None,
    cluster: Cluster = None,
    measured: MeasuredSteps = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, max=100)] = 10,
    as_json: AsJson = False,
) -> None:
    """List the fastest layouts of a model that fit in memory. The exit code is 1 if no layout fits."""
    with connect() as client:
        draft = _read_draft(client, spec, config, changes)
        query: dict[str, Any] = {"spec": draft, "ranks": ranks, "limit": limit, **_read_measured_steps(measured)}
        result = client.search({**query, "cluster": cluster} if cluster else query)
    if as_json:
        print_json(result)
    else:
        print(text_reports.format_layouts(result) if result["best"] else "No layout fits in memory.")
        print(text_reports.format_search_summary(result), file=sys.stderr)
    if not result["best"]:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def advise(job_id: JobId, as_json: AsJson = False) -> None:
    """List faster layouts for a finished job, and the part of the step that each layout improves."""
    with connect() as client:
        advice = client.advice(job_id)
    print_json(advice) if as_json else print(text_reports.format_advice(advice))


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
    raw: Annotated[
        bool, typer.Option("--raw", help="print the bytes as written, with every state of a progress bar")
    ] = False,
) -> None:
    """Print the complete log of a rank as a terminal shows it, or follow it."""
    if raw and (follow or as_json):
        raise WrongError("`--raw` cannot be used with --follow or --json, which print lines. Omit one of them.")
    with connect() as client:
        if raw:
            for part in client.log(job_id, rank, attempt=attempt):
                sys.stdout.buffer.write(part)
            return
        screen = OpenLines(sys.stdout)
        if not follow:
            lines = split_lines(client.log(job_id, rank, attempt=attempt, raw=False))
        elif attempt is None:
            lines = follow_lines(client, job_id, rank, screen.show)
        else:
            lines = follow_attempt(client, job_id, rank, attempt, screen.show)
        _print_lines(lines, rank, as_json, screen)


def _print_lines(lines: Iterator[str], rank: int, as_json: bool, screen: OpenLines) -> None:
    for line in lines:
        screen.erase()
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
    newest: JobProgress | None = None

    def remember(updates: Iterator[JobProgress]) -> Iterator[JobProgress]:
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
