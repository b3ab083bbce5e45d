"""Handle jobs that slurmctld no longer knows, with real output of sacct."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.queue.slurm.commands import CommandRunner, PollRequest, PollResult, Slurm, poll
from jobs.queue.slurm.states import describe_end, describe_missing_record, parse_sacct

NAME = "meshboard-abc-2"
ENDED = f"17|FAILED|main|node0|2026-11-22T20:13:50|{NAME}|3:0|62|ReqNodeNotAvail"
RUNS = f"17|RUNNING|main|node0|2026-11-22T20:13:50|{NAME}|0:0|62|None"
# Output of sacct 22.05.8.
REAL = """\
1|NODE_FAIL|main|node1|2026-11-22T20:13:50|meshboard-powerless-1|0:0|7|ReqNodeNotAvail
2|FAILED|main|node0|2026-11-22T20:13:50|meshboard-three-1|3:0|0|ReqNodeNotAvail
3|COMPLETED|main|node0|2026-11-22T20:13:50|meshboard-well-1|0:0|0|ReqNodeNotAvail
4|FAILED|main|node0|2026-11-22T20:13:50|meshboard-killed-1|0:9|0|ReqNodeNotAvail
5|CANCELLED by 0|main|None assigned|2026-11-22T20:13:50|meshboard-cancelled-1|0:0|0|ReqNodeNotAvail
6|FAILED|main|node0|2026-11-22T20:13:50|somebody-else|1:0|0|None
"""
NO_ACCOUNTS = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
AWAY = "echo 'sacct: error: Problem talking to the database: Connection refused' >&2; exit 1"


@pytest.fixture
def query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PollResult]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run_query(sacct: str, noted: str = "17") -> PollResult:
        for name, body in (("squeue", "true"), ("sacct", sacct)):
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        return poll(Slurm(CommandRunner()), PollRequest({NAME: noted}))

    return run_query


def test_job_end_is_read_from_accounts(query: Callable[..., PollResult]) -> None:
    news = query(f"echo '{ENDED}'")
    assert (news.trouble, news.absent, news.accounts) == ("", frozenset(), True)
    assert describe_end(news.jobs[NAME]).reason == (
        "Slurm: the batch script failed; job 17 on node0, FAILED, exit code 3, after 0:01:02"
    )


def test_job_running_only_in_accounts_is_gone_from_its_noted_state(query: Callable[..., PollResult]) -> None:
    assert query(f"echo '{RUNS}'").absent == {NAME}
    assert query(f"echo '{RUNS}'", noted="").jobs[NAME].state == "RUNNING", "another controller has just submitted it"


def test_job_without_accounts_is_absent_with_a_reason(query: Callable[..., PollResult]) -> None:
    news = query(NO_ACCOUNTS)
    assert (news.trouble, news.absent, news.accounts) == ("", {NAME}, False)
    assert "accounting (sacct) is off" in describe_missing_record("17", accounts=news.accounts)


def test_unavailable_accounts_make_no_job_absent(query: Callable[..., PollResult]) -> None:
    news = query(AWAY)
    assert news.absent == set()
    assert news.trouble == "sacct: sacct: error: Problem talking to the database: Connection refused"


def test_job_ends_are_reported_in_the_words_of_the_accounts() -> None:
    assert [describe_end(job).reason for job in parse_sacct(REAL)] == [
        "Slurm: a node failed; job 1 on node1, NODE_FAIL, after 0:00:07",
        "Slurm: the batch script failed; job 2 on node0, FAILED, exit code 3, after 0:00:00",
        "Slurm: the job completed without an exit report; job 3 on node0, COMPLETED, after 0:00:00",
        "Slurm: the batch script failed; job 4 on node0, FAILED, signal 9, after 0:00:00",
        "Slurm: the job was cancelled in Slurm, not in Meshboard; job 5, CANCELLED, after 0:00:00",
    ]
