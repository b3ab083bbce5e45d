"""Steps that somebody drags over: the part, axis, rank and collective that differ from the others, and by how much."""

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
from tests.jobs.history.told import BEGAN, batch, keep, step

Api = Callable[[User | None], APIClient]
SLOW = range(21, 26)


def timeline(rank: int, number: int, issued_s: float, ended_s: float) -> Any:
    """A step in which the rank issued one all-reduce, seconds after the step began."""
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


def run(late: int | None, part: str = "data") -> Iterator[Any]:
    """40 steps of two ranks, a second each; in the slow ones rank `late` took 0.3 s longer over `part`, and the other
    waited; with None both did."""
    hosts = [{"kind": "gauge", "rank": rank, "time": BEGAN, "resident_bytes": 1} for rank in (0, 1)]
    yield batch(0, *hosts, host="anna")
    for number in range(1, 41):
        items = []
        for rank in (0, 1):
            parts: dict[str, Any] = {"data": 0.01, "optimizer": 0.02, "exposed": {"dp": 0.1}, "hidden": {"dp": 0.2}}
            delayed = number in SLOW and late in (rank, None)
            if delayed and part == "data":
                parts["data"] = 0.31
            if number in SLOW and not delayed:
                parts["exposed"] = {"dp": 0.4}
            items.append(step(rank, number, number, parts=parts, step_s=0.8 if number in SLOW else 0.5))
            items.append(timeline(rank, number, 0.7 if delayed else 0.4, 0.8 if number in SLOW else 0.5))
        yield batch(number, *items)


def told(root: Path, *batches: Any) -> SlowSteps:
    keep(root, list(*batches))
    return explain_slow_steps("job", 1, SLOW.start, SLOW.stop - 1)


def found(answer: SlowSteps) -> list[tuple[str, str | None, int | None, float, float]]:
    return [(f["part"], f["axis"], f["rank"], f["seconds"], f["usual_s"]) for f in answer["findings"]]


def test_a_rank_whose_loader_is_slow_is_named_with_who_waits_for_it(root: Path) -> None:
    answer = told(root, run(late=1))
    assert (answer["steps"], answer["others"], answer["step_s"], answer["usual_s"]) == (5, 35, 0.8, 0.5)
    assert set(found(answer)) == {("data", None, 1, 0.31, 0.01), ("exposed", "dp", 0, 0.4, 0.1)}
    (call,) = answer["calls"]
    assert (call["op"], call["axis"], call["ranks"], call["last"]) == ("all_reduce", "dp", [0, 1], 1)
    assert (round(call["ended_s"], 3), round(call["usual_s"], 3)) == (0.4, 0.1)


def test_a_slow_computation_is_what_no_part_is_told_of(root: Path) -> None:
    answer = told(root, run(late=0, part="compute"))
    assert ("compute (remainder)", None, 0, 0.67, 0.37) in found(answer)
    assert ("exposed", "dp", 1, 0.4, 0.1) in found(answer)


def test_what_grows_on_every_rank_is_laid_to_none(root: Path) -> None:
    answer = told(root, run(late=None))
    assert found(answer) == [("data", None, None, 0.31, 0.01)]


def seldom(*exposed: int) -> Iterator[Any]:
    """40 steps of a rank that stands still in dp for 0.5 s in these and else never, which a meter leaves out."""
    for number in range(1, 41):
        still = {"dp": 0.5} if number in exposed else {}
        parts = {"data": 0.0, "optimizer": 0.0, "exposed": still, "hidden": {}}
        yield batch(number, step(0, number, number, parts=parts, step_s=1.5 if still else 1.0))


def test_an_axis_that_a_step_does_not_name_held_it_up_for_no_time(root: Path) -> None:
    answer = told(root, seldom(7, *SLOW))
    assert (answer["step_s"], answer["usual_s"]) == (1.5, 1.0)
    assert found(answer) == [("exposed", "dp", 0, 0.5, 0.0)]


def test_one_step_that_stood_still_is_not_said_of_all_that_were_chosen(root: Path) -> None:
    assert found(told(root, seldom(SLOW.start))) == []


def test_steps_without_others_and_no_steps_are_said_to_be_that(root: Path) -> None:
    keep(root, list(run(late=1)))
    for bounds in ((1, 40), (41, 50), (30, 20)):
        with pytest.raises(NoStepsError):
            explain_slow_steps("job", 1, *bounds)


@pytest.mark.parametrize("query", ["", "from=1", "from=x&to=2", "from=1&from=1&to=2", "from=0&to=2", "from=1&to=2&z=1"])
def test_a_senseless_question_names_its_parameter(
    query: str, attempt: Attempt, root: Path, owner: User, client: Client, api: Api
) -> None:
    client.force_login(owner)
    assert client.get(f"/jobs/{attempt.job_id}/history/steps/slow/?{query}").status_code == 400
    answer = api(owner).get(f"/api/v1/jobs/{attempt.job_id}/history/steps/slow?{query}")
    assert answer.status_code == 400
    assert {error["field"] for error in answer.json()["errors"]} <= {"from", "to", "z"}


def test_only_who_may_see_the_job_is_told(attempt: Attempt, root: Path, stranger: User, client: Client) -> None:
    client.force_login(stranger)
    assert client.get(f"/jobs/{attempt.job_id}/history/steps/slow/?from=1&to=2").status_code == 404
