"""Parse the output of squeue and sacct, without jobs of other users."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from jobs.queue.slurm.states import SlurmJob, describe_end, describe_wait, has_ended, parse_squeue

PENDING = "17|PENDING|gpu||2026-11-22T14:05:00|meshboard-abc-2|Resources"


def test_row_is_parsed_with_utc_time() -> None:
    (job,) = parse_squeue(PENDING)
    start = datetime(2026, 11, 22, 14, 5, tzinfo=UTC)
    assert job == SlurmJob("17", "PENDING", "gpu", "", start, "meshboard-abc-2", "Resources")
    assert describe_wait(job) == (
        "Slurm: waiting for Resources: not enough free nodes with the requested resources, "
        "expected start 2026-11-22 14:05 UTC"
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "JOBID|STATE",
        "17|PENDING|gpu||N/A|somebody-else|Resources",
        "17_3|PENDING|gpu||N/A|meshboard-abc-2|Resources",
        "x|PENDING|gpu||N/A|meshboard-abc-2|Resources",
        "17|PENDING|gpu||N/A|meshboard-abc-2-|Resources",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    ],
)
def test_foreign_jobs_are_ignored(line: str) -> None:
    assert [job.id for job in parse_squeue(f"{line}\n{PENDING}")] == ["17"]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("None", "Slurm: waiting for the first scheduling pass"),
        ("ReqNodeNotAvail, UnavailableNodes:node1", "(UnavailableNodes:node1)"),
        ("QOSMaxJobsPerUserLimit", "Slurm: waiting for QOSMaxJobsPerUserLimit"),
        ("a | b", "Slurm: waiting for a | b"),
    ],
)
def test_known_and_unknown_reasons_are_reported(reason: str, expected: str) -> None:
    (job,) = parse_squeue(f"17|PENDING|gpu||N/A|meshboard-abc-2|{reason}")
    assert describe_wait(job).endswith(expected)


def test_unconsidered_job_has_no_expected_start() -> None:
    not_yet, considered = (
        describe_wait(*parse_squeue(line)) for line in (PENDING.replace("Resources", "None"), PENDING)
    )
    assert not_yet == "Slurm: waiting for the first scheduling pass"
    assert re.search(r", expected start 2026-11-22 \d\d:\d\d UTC$", considered)


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("COMPLETED", "succeeded"),
        ("FAILED", "failed"),
        ("TIMEOUT", "failed"),
        ("CANCELLED by 1000", "failed"),
        ("NODE_FAIL", "lost"),
        ("PREEMPTED", "lost"),
        ("OUT_OF_MEMORY", "failed"),
    ],
)
def test_end_is_reported_in_slurm_words(state: str, outcome: str) -> None:
    (job,) = parse_squeue(f"17|{state}|gpu|node[1-2]|2026-11-22T14:05:00|meshboard-abc-2|None")
    assert has_ended(job)
    assert describe_end(job).outcome == outcome
    assert describe_end(job).reason.endswith(f"; job 17 on node[1-2], {state.partition(' ')[0]}")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "A_NEW_WORD"])
def test_unfinished_or_unknown_job_is_still_awaited(state: str) -> None:
    (job,) = parse_squeue(f"17|{state}|gpu|node1|N/A|meshboard-abc-2|None")
    assert not has_ended(job)
