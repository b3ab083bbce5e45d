"""Explain slow steps by part, axis, rank, and collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import Attempt
from jobs.runs.history.queries.step_breakdown import NoStepsError, SlowSteps, explain_slow_steps
from tests.jobs.history.sample_telemetry import BEGAN, batch, record_batches, step

Api = Callable[[User | None], APIClient]
SLOW = range(21, 26)


def timeline(rank: int, number: int, issued_s: float, ended_s: float) -> Any:
    """Return a timeline item with one all-reduce. Times are seconds after the start of the step."""
    microseconds = [round(1e6 * issued_s)], [round(1e6 * ended_s)]
    return {
        "kind": "timeline",
        "rank": rank,
        "time": BEGAN + number,
        "step": number,
        "began": BEGAN + number - 1,
        "step_s": ended_s,
        "groups": [{"axis": "dp", "ranks": [0, 1], "nth": 0}],
        "calls": {
            "group": [0],
            "op": ["all_reduce"],
            "sequence": [number],
            "issued_us": microseconds[0],
            "blocked_us": [0],
            "ended_us": microseconds[1],
            "payload_bytes": [1000],
            "peer": [-1],
        },
        "spans": {"work": [], "chunk": [], "micro_batch": [], "from_us": [], "to_us": []},
        "left_out": 0,
    }


def run(late_rank: int | None, part: str = "data") -> Iterator[Any]:
    """Yield 40 steps of two ranks. In SLOW steps, rank `late_rank` needs 0.3 s more for `part`, and the other waits.

    None: both ranks are late.
    """
    hosts = [{"kind": "gauge", "rank": rank, "time": BEGAN, "resident_bytes": 1} for rank in (0, 1)]
    yield batch(0, *hosts, host="anna")
    for number in range(1, 41):
        items = []
        for rank in (0, 1):
            parts: dict[str, Any] = {"data": 0.01, "optimizer": 0.02, "exposed": {"dp": 0.1}, "hidden": {"dp": 0.2}}
            delayed = number in SLOW and late_rank in (rank, None)
            if delayed and part == "data":
                parts["data"] = 0.31
            if number in SLOW and not delayed:
                parts["exposed"] = {"dp": 0.4}
            items.append(step(rank, number, number, parts=parts, step_s=0.8 if number in SLOW else 0.5))
            items.append(timeline(rank, number, 0.7 if delayed else 0.4, 0.8 if number in SLOW else 0.5))
        yield batch(number, *items)


def explain_run(root: Path, *batches: Any) -> SlowSteps:
    record_batches(root, list(*batches))
    return explain_slow_steps("job", 1, SLOW.start, SLOW.stop - 1)


def list_findings(answer: SlowSteps) -> list[tuple[str, str | None, int | None, float, float]]:
    return [(f["part"], f["axis"], f["rank"], f["seconds"], f["usual_s"]) for f in answer["findings"]]


def test_names_the_rank_with_the_slow_loader_and_the_waiting_rank(root: Path) -> None:
    answer = explain_run(root, run(late_rank=1))
    assert (answer["steps"], answer["others"], answer["step_s"], answer["usual_s"]) == (5, 35, 0.8, 0.5)
    assert set(list_findings(answer)) == {("data", None, 1, 0.31, 0.01), ("exposed", "dp", 0, 0.4, 0.1)}
    (call,) = answer["calls"]
    assert (call["op"], call["axis"], call["ranks"], call["last"]) == ("all_reduce", "dp", [0, 1], 1)
    assert (round(call["ended_s"], 3), round(call["usual_s"], 3)) == (0.4, 0.1)


def test_slow_compute_is_the_remainder(root: Path) -> None:
    answer = explain_run(root, run(late_rank=0, part="compute"))
    assert ("compute (remainder)", None, 0, 0.67, 0.37) in list_findings(answer)
    assert ("exposed", "dp", 1, 0.4, 0.1) in list_findings(answer)


def test_increase_on_all_ranks_names_no_rank(root: Path) -> None:
    answer = explain_run(root, run(late_rank=None))
    assert list_findings(answer) == [("data", None, None, 0.31, 0.01)]


def generate_rare_stalls(*exposed: int) -> Iterator[Any]:
    """Yield 40 steps of a rank that dp blocks for 0.5 s in the given steps only."""
    for number in range(1, 41):
        still = {"dp": 0.5} if number in exposed else {}
        parts = {"data": 0.0, "optimizer": 0.0, "exposed": still, "hidden": {}}
        yield batch(number, step(0, number, number, parts=parts, step_s=1.5 if still else 1.0))


def test_axis_missing_in_a_step_counts_as_zero(root: Path) -> None:
    answer = explain_run(root, generate_rare_stalls(7, *SLOW))
    assert (answer["step_s"], answer["usual_s"]) == (1.5, 1.0)
    assert list_findings(answer) == [("exposed", "dp", 0, 0.5, 0.0)]


def test_single_stalled_step_is_not_a_finding(root: Path) -> None:
    assert list_findings(explain_run(root, generate_rare_stalls(SLOW.start))) == []


def test_rejects_a_range_without_steps_or_without_others(root: Path) -> None:
    record_batches(root, list(run(late_rank=1)))
    for bounds in ((1, 40), (41, 50), (30, 20)):
        with pytest.raises(NoStepsError):
            explain_slow_steps("job", 1, *bounds)


@pytest.mark.parametrize("query", ["", "from=1", "from=x&to=2", "from=1&from=1&to=2", "from=0&to=2", "from=1&to=2&z=1"])
def test_rejects_invalid_range_by_parameter(
    query: str, attempt: Attempt, root: Path, owner: User, client: Client, api: Api
) -> None:
    client.force_login(owner)
    assert client.get(f"/jobs/{attempt.job_id}/history/steps/slow/?{query}").status_code == 400
    answer = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/history/steps/slow?{query}")
    assert answer.status_code == 400
    assert {error["field"] for error in answer.json()["errors"]} <= {"from", "to", "z"}


def test_requires_access_to_the_job(attempt: Attempt, root: Path, stranger: User, client: Client) -> None:
    client.force_login(stranger)
    assert client.get(f"/jobs/{attempt.job_id}/history/steps/slow/?from=1&to=2").status_code == 404
