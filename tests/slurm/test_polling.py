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


def build_query(folder: Path, job: str, body: str = "sleep 60", *more: str) -> Submission:
    name = format_job_name(job, 1)
    options = (f"--job-name={name}", f"--output={folder}/%j.out", "--dependency=singleton", *more)
    return Submission(name, options, f"#!/bin/sh\n{body}\n")


def round_of(
    known: dict[str, str], start: Iterable[Submission] = (), end: Iterable[str] = (), slurm: Slurm = SLURM
) -> PollResult:
    return poll(slurm, PollRequest(known, tuple(start), frozenset(end), folder="/tmp"))


def get_states(name: str) -> dict[str, str]:
    return {job.id: job.state for job in SLURM.list_jobs() if job.name == name}


def test_submitted_but_unsaved_job_is_found_and_not_submitted_again(slurm: Cluster, tmp_path: Path) -> None:
    job = build_query(tmp_path, "cutoff")
    first = round_of({job.name: ""}, [job])
    again = round_of({job.name: ""}, [job])  # like the next controller, which has no id
    assert again.submitted == {}
    assert again.jobs[job.name].id == first.submitted[job.name]
    assert len(get_states(job.name)) == 1


def test_saved_job_wins_over_a_second_job_with_its_name(slurm: Cluster, tmp_path: Path) -> None:
    job = build_query(tmp_path, "double")
    first = SLURM.submit(job.options, job.script)
    second = SLURM.submit(job.options, job.script)  # for example, two controllers at once
    news = round_of({job.name: second}, [job])
    assert news.jobs[job.name].id == second
    wait_until(lambda: get_states(job.name).get(first) == "CANCELLED", "the other one ends")
    wait_until(lambda: get_states(job.name).get(second) == "RUNNING", "the noted one runs")


def test_first_job_wins_if_neither_was_saved(slurm: Cluster, tmp_path: Path) -> None:
    job = build_query(tmp_path, "nobody")
    first, second = SLURM.submit(job.options, job.script), SLURM.submit(job.options, job.script)
    assert round_of({job.name: ""}, [job]).jobs[job.name].id == first
    wait_until(lambda: get_states(job.name).get(second) == "CANCELLED", "the second ends")


def test_round_cancels_one_job_and_reports_the_rejection_of_another(slurm: Cluster, tmp_path: Path) -> None:
    good, bad = build_query(tmp_path, "good"), build_query(tmp_path, "bad", "true", "--partition=nowhere")
    news = round_of({good.name: "", bad.name: ""}, [bad, good])
    assert list(news.submitted) == [good.name]
    assert {name: why.lower() for name, why in news.rejected.items()} == {bad.name: "invalid partition name specified"}
    round_of({good.name: news.submitted[good.name]}, end=[good.name])
    wait_until(lambda: list(get_states(good.name).values()) == ["CANCELLED"], "it is cancelled")


def test_job_unknown_to_slurm_is_absent(slurm: Cluster, tmp_path: Path) -> None:
    known = build_query(tmp_path, "known")
    SLURM.submit(known.options, known.script)
    gone, never = format_job_name("gone", 1), format_job_name("never", 1)
    news = round_of({gone: "999999", never: "", known.name: ""})
    assert news.absent == {gone, never}
    assert news.trouble == ""


def test_failed_script_reports_its_output(slurm: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "said"
    job = build_query(tmp_path, "speaks", "echo no such module; exit 1", f"--output={log}")
    SLURM.submit(job.options, job.script)
    wait_until(lambda: list(get_states(job.name).values()) == ["FAILED"], "it fails")
    assert poll(SLURM, PollRequest({job.name: ""}, logs={job.name: str(log)})).logs == {job.name: "no such module\n"}


def test_no_job_is_absent_while_slurm_is_unavailable() -> None:
    away = Slurm(CommandRunner("root@127.0.0.1", "/dev/null"))
    news = round_of({format_job_name("gone", 1): "999999"}, slurm=away)
    assert news.absent == set()
    assert "Cannot reach the login node root@127.0.0.1" in news.trouble
