"""The checks at the end of `make mix` report each kind of problem."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from tests.faults.mix import FaultMix
from tests.support.board import Board


class EndedBoard:
    """A board after the mix. Each test gives it one problem."""

    def __init__(self, statuses: list[str], *, log: str = "", pids: tuple[int, ...] = (), free_slots: int = 4) -> None:
        self.statuses, self.log, self.pids, self.free_slots = statuses, log, list(pids), free_slots

    def get_job(self, job: str) -> dict[str, Any]:
        history = [{"status": status, "attempt": 1, "reason": "a reason"} for status in self.statuses]
        return {"id": job, "status": self.statuses[-1], "history": history, "exit": None}

    def read_log(self, _name: str) -> str:
        return self.log

    def list_processes(self, _job: str) -> list[int]:
        return self.pids

    def call(self, _method: str, _path: str) -> list[dict[str, int]]:
        return [{"slots": 4, "free_slots": self.free_slots}]


GOOD = ["queued", "starting", "running", "succeeded"]


@pytest.mark.parametrize(
    ("board", "touched", "problems"),
    [
        (EndedBoard(GOOD), [], []),
        (EndedBoard([*GOOD[:3], "failed"]), ["rank killed"], []),
        (EndedBoard([*GOOD[:3], "failed"]), [], ["job was healthy and is failed: a reason"]),
        (EndedBoard([*GOOD[:3], "lost"]), [], ["job was healthy and is lost: a reason"]),
        (EndedBoard(GOOD[:3]), ["rank killed"], [f"job never ended: {GOOD[:3]} (rank killed)"]),
        (EndedBoard(["queued", "succeeded"]), [], ["job has an illegal history: [['queued', 'succeeded']]"]),
        (EndedBoard(GOOD, pids=(7,)), [], ["job left processes [7]"]),
        (EndedBoard(GOOD, free_slots=3), [], ["slots are still held: 3 of 4 are free"]),
        (
            EndedBoard(GOOD, log="a line\nInternal Server Error: /api/v1/jobs"),
            [],
            ["1 requests got status 500: Internal Server Error: /api/v1/jobs"],
        ),
    ],
)
def test_reports_each_problem_of_a_mix(board: EndedBoard, touched: list[str], problems: list[str]) -> None:
    mix = FaultMix(cast("Board", board), "", seed=1)
    mix.jobs = ["job"]
    if touched:
        mix.touched["job"] = touched
    assert mix.list_problems() == problems


def test_reports_an_outage_that_could_not_be_made() -> None:
    def refuse() -> AbstractContextManager[None]:
        raise OSError("no space for a mount")

    mix = FaultMix(cast("Board", EndedBoard(GOOD)), "", seed=1)
    mix.outages = {"full disk": refuse}
    mix.hold_outage("full disk", 0)
    assert mix.list_problems() == ["outage full disk: OSError('no space for a mount')"]
