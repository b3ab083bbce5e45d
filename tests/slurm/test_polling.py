"""A polling round with a real Slurm submits no job twice after interruptions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from jobs.queue.slurm.commands import CommandRunner, PollRequest, PollResult, Slurm, poll
from jobs.queue.slurm.script import Submission
from jobs.queue.slurm.states import format_job_name
from tests.slurm.cluster import Cluster
from tests.support.processes import wait_until

pytestmark = pytest.mark.slow

SLURM = Slurm(CommandRunner())


def asked(folder: Path, job: str, body: str = "sleep 60", *more: str) -> Submission:
    name = format_job_name(job, 1)
    options = (f"--job-name={name}", f"--output={folder}/%j.out", "--dependency=singleton", *more)
    return Submission(name, options, f"#!/bin/sh\n{body}\n")


def round_of(
    known: dict[str, str], start: Iterable[Submission] = (), end: Iterable[str] = (), slurm: Slurm = SLURM
) -> PollResult:
    return poll(slurm, PollRequest(known, tuple(start), frozenset(end), folder="/tmp"))


def states(name: str) -> dict[str, str]:
    return {job.id: job.state for job in SLURM.list_jobs() if job.name == name}


def test_what_was_submitted_and_not_noted_is_found_and_not_sent_again(slurm: Cluster, tmp_path: Path) -> None:
    job = asked(tmp_path, "cutoff")
    first = round_of({job.name: ""}, [job])
    again = round_of({job.name: ""}, [job])  # as the next controller, to which nobody told an id
    assert again.submitted == {}
    assert again.jobs[job.name].id == first.submitted[job.name]
    assert len(states(job.name)) == 1


def test_of_two_by_one_name_the_noted_one_counts_and_the_other_ends(slurm: Cluster, tmp_path: Path) -> None:
    job = asked(tmp_path, "double")
    first = SLURM.submit(job.options, job.script)
    second = SLURM.submit(job.options, job.script)  # two controllers at once, say
    news = round_of({job.name: second}, [job])
    assert news.jobs[job.name].id == second
    wait_until(lambda: states(job.name).get(first) == "CANCELLED", "the other one ends")
    wait_until(lambda: states(job.name).get(second) == "RUNNING", "the noted one runs")


def test_where_none_of_two_was_noted_the_first_counts(slurm: Cluster, tmp_path: Path) -> None:
    job = asked(tmp_path, "nobody")
    first, second = SLURM.submit(job.options, job.script), SLURM.submit(job.options, job.script)
    assert round_of({job.name: ""}, [job]).jobs[job.name].id == first
    wait_until(lambda: states(job.name).get(second) == "CANCELLED", "the second ends")


def test_a_cancelled_one_ends_and_one_that_is_refused_says_why_beside_the_others(
    slurm: Cluster, tmp_path: Path
) -> None:
    good, bad = asked(tmp_path, "good"), asked(tmp_path, "bad", "true", "--partition=nowhere")
    news = round_of({good.name: "", bad.name: ""}, [bad, good])
    assert list(news.submitted) == [good.name]
    assert {name: why.lower() for name, why in news.rejected.items()} == {bad.name: "invalid partition name specified"}
    round_of({good.name: news.submitted[good.name]}, end=[good.name])
    wait_until(lambda: list(states(good.name).values()) == ["CANCELLED"], "it is cancelled")


def test_a_job_that_slurm_does_not_know_is_absent(slurm: Cluster, tmp_path: Path) -> None:
    known = asked(tmp_path, "known")
    SLURM.submit(known.options, known.script)
    gone, never = format_job_name("gone", 1), format_job_name("never", 1)
    news = round_of({gone: "999999", never: "", known.name: ""})
    assert news.absent == {gone, never}
    assert news.trouble == ""


def test_what_a_script_printed_is_told_where_it_failed(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "said"
    job = asked(tmp_path, "speaks", "echo no such module; exit 1", f"--output={log}")
    SLURM.submit(job.options, job.script)
    wait_until(lambda: list(states(job.name).values()) == ["FAILED"], "it fails")
    assert poll(SLURM, PollRequest({job.name: ""}, logs={job.name: str(log)})).logs == {job.name: "no such module\n"}


def test_while_slurm_is_away_nothing_is_absent() -> None:
    away = Slurm(CommandRunner("root@127.0.0.1", "/dev/null"))
    news = round_of({format_job_name("gone", 1): "999999"}, slurm=away)
    assert news.absent == set()
    assert "Cannot reach the login node root@127.0.0.1" in news.trouble
