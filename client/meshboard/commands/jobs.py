"""Jobs: submit, wait for, show, end, run again, compare."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console

from meshboard import files, following
from meshboard.api import Client, sendable_key
from meshboard.commands.app import AsJson, JobId, JobIds, Sets, Spec, Timeout, app, board, print_json
from meshboard.commands.refusals import each
from meshboard.errors import AwayError, RefusedError, WrongError
from meshboard.exits import Exit
from meshboard.job import Job
from meshboard.look import look, looks
from meshboard.show import jobs as shown
from meshboard.show import reasons
from meshboard.show.live import Waiting, say_log, stderr
from meshboard.show.words import clean

LEAST_COMPARED, MOST_COMPARED = 2, 6  # as the board has it
SEVERAL = "separate values with commas, or repeat the option"
OF_STATES = f"list only jobs with this status, or all jobs that have not ended (active); {SEVERAL}"
OF_KINDS = f"list only jobs of this kind: train, script, dry_run, lab, calibrate; {SEVERAL}"
WITH_TAGS = f"list only jobs that have all these tags; {SEVERAL}"
LAST_WORDS_S = 10.0  # for the end of a log, once its job has ended


@app.command()
def submit(
    spec: Spec,
    changes: Sets = [],  # noqa: B006
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
    told, keys = files.spec(spec, changes), _keys(key, runs)
    seen: dict[str, Job] = {}
    with board() as client, _told(seen, as_json, several=runs > 1):
        for one in keys:
            job = client.submit(told, key=one, allow_unfit=allow_unfit)
            seen[job.id] = job
            if not as_json:
                print(job.id, flush=True)  # a build that is cut off while it waits knows what it started
            before = " already exists, because this spec was submitted with this key before" if job.was_there else ""
            print(f"{clean(job.name)}: {client.url}/jobs/{job.id}/{before}", file=sys.stderr)
            if why := reasons.chosen(job.told):
                print(why, file=sys.stderr)
        if wait or follow:
            began, console = time.monotonic(), stderr()
            labels = {job_id: job_id if runs > 1 else "" for job_id in seen}
            logs = [_saying(client, *job, console) for job in labels.items()] if follow else []
            for job_id, label in labels.items():
                _wait(client, job_id, seen, Waiting(label, console), timeout, began)
            for said in logs:
                said.join(LAST_WORDS_S)
    if (wait or follow) and not all(job.succeeded for job in seen.values()):
        raise typer.Exit(Exit.FAILED)


def _keys(key: str | None, runs: int) -> list[str | None]:
    """One for each of several jobs, or they would be one."""
    if key is None:
        return [None] * runs
    sendable_key(key, "--key")
    return [key] if runs == 1 else [sendable_key(f"{key}-{number}", "--key") for number in range(1, runs + 1)]


@contextmanager
def _told(seen: dict[str, Job], as_json: bool, *, several: bool = False) -> Iterator[None]:
    """Jobs as they were seen last are told however the wait for them ends: a build that is cut off knows them."""
    try:
        yield
    finally:
        if as_json and seen:
            found = [job.told for job in seen.values()]
            print_json(found if several else found[0])


@app.command()
def wait(job_id: JobId, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Wait until a job ends. Exit code 1 unless it succeeded."""
    seen: dict[str, Job] = {}
    with board() as client, _told(seen, as_json):
        _wait(client, job_id, seen, Waiting(), timeout, time.monotonic())
    if not seen[job_id].succeeded:
        raise typer.Exit(Exit.FAILED)


def _wait(
    client: Client, job_id: str, seen: dict[str, Job], shown: Waiting, timeout_s: float | None, since: float
) -> None:
    """`seen` has it as it was looked at last."""
    with shown as waiting:

        def hear(job: Job) -> None:
            seen[job_id] = job
            waiting(job)
            if waiting.shows_steps and not job.finished:
                waiting.at(look(client, job))

        if waiting.shows_steps:
            threading.Thread(target=_count_steps, args=(client, job_id, waiting), daemon=True).start()
        client.wait(job_id, timeout_s=timeout_s, since=since, each=hear)


def _count_steps(client: Client, job_id: str, waiting: Waiting) -> None:
    """As they come; of a board that tells nothing live, `hear` knows what its recorder does."""
    with suppress(RefusedError, AwayError, RuntimeError):  # the last: of a client that was closed, as the wait ended
        for seen in looks(client, client.job(job_id)):
            waiting.at(seen)


def _saying(client: Client, job_id: str, label: str, console: Console) -> threading.Thread:
    said = threading.Thread(target=_say_log, args=(client, job_id, label, console), daemon=True)
    said.start()
    return said


def _say_log(client: Client, job_id: str, label: str, console: Console) -> None:
    """A log that cannot be followed ends no wait."""
    try:
        say_log(console, label, following.lines(client, job_id, rank=0))
    except (RefusedError, AwayError) as error:
        say_log(console, label, [f"[cannot follow the log: {error}]"])
    except RuntimeError:
        return  # the wait has ended, and with it the client


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="job id; without it, list the newest jobs")
    ] = None,
    state: Annotated[list[str] | None, typer.Option(help=OF_STATES)] = None,
    kind: Annotated[list[str] | None, typer.Option(help=OF_KINDS)] = None,
    project: Annotated[str | None, typer.Option(help="list only jobs of this project")] = None,
    tag: Annotated[list[str] | None, typer.Option(help=WITH_TAGS)] = None,
    owner: Annotated[str | None, typer.Option(help="list only jobs of this user")] = None,
    mine: Annotated[bool, typer.Option("--mine", help="list only your jobs")] = False,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show a job with its verdict, or list the newest jobs."""
    asked = {"status": state or None, "kind": kind or None, "project": project, "tag": tag or None, "owner": owner}
    asked["whose"] = "mine" if mine else None
    if job_id is not None and any(value is not None for value in asked.values()):
        named = "--state, --kind, --project, --tag, --owner and --mine"
        raise WrongError(f"{named} work only without a job id. Omit these options, or omit {job_id}.")
    with board() as client:
        if job_id is not None:
            job = client.job(job_id)
            print_json(job.told) if as_json else print(shown.detail(job))
            return
        found = list(islice(client.jobs(**asked, limit=limit), limit))
    print_json(found) if as_json else print(shown.briefs(found))


@app.command()
def cancel(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Cancel jobs. If one job cannot be cancelled, the others still are."""
    with board() as client:
        _act(job_ids, client.cancel, as_json)


@app.command()
def retry(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Retry ended jobs. Each gets a new attempt with the same spec."""
    with board() as client:
        _act(job_ids, client.requeue, as_json)


def _act(job_ids: list[str], act: Callable[[str], Job], as_json: bool) -> None:
    found, worst = each(job_ids, lambda job_id: act(job_id).told)
    if as_json:
        print_json(found)
    else:
        for told in found:
            if "errors" not in told:
                print(shown.line(Job(told)))
    if worst:
        raise typer.Exit(worst)


@app.command()
def compare(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Compare the specs and measurements of two to six jobs."""
    if not LEAST_COMPARED <= len(set(job_ids)) <= MOST_COMPARED or len(set(job_ids)) < len(job_ids):
        words = f"Use {LEAST_COMPARED} to {MOST_COMPARED} different job ids, separated by spaces"
        raise WrongError(f"{words}, not {' '.join(job_ids)}.", "jobs")
    with board() as client:
        told = client.compare(job_ids)
    print_json(told) if as_json else print(shown.compared(told))
