"""Backfill: later jobs use hosts that are kept for a waiting job, and never delay that job."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.scheduling.backfill import BACKFILL_MARGIN_S
from jobs.queue.scheduling.placement import RunningAttempt, SchedulingPlan, forecast, plan_pass
from jobs.queue.scheduling.states import HostState, Occupant, QueuedJob, Share
from tests.jobs.queue.scheduling_cases import job

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
STEP_S = 100.0  # longer than the margin of a backfilled job
NEVER = 10**6
MAX_PASSES = 25


class Run(NamedTuple):
    """A running attempt. `ends` is its real end, `predicted` its predicted end, and `limit` its end by time limit."""

    shares: tuple[Share, ...]
    ends: float
    predicted: float | None
    limit: float | None


class Board:
    """Hosts and jobs on a simulated clock, independent of the scheduler."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots, self.now = slots, 0.0
        self.running: dict[str, Run] = {}
        self.queue: dict[str, QueuedJob] = {}
        self.lasts: dict[str, float] = {}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.starts: dict[str, float] = {}
        self.backfilled: set[str] = set()

    def build_host(self, name: str) -> HostState:
        here = {id: (share, run) for id, run in self.running.items() for share in run.shares if share.host == name}
        taken = [slot for share, _ in here.values() for slot in share.slots]
        assert len(taken) == len(set(taken)), "two jobs have a slot"
        assert all(slot < self.slots[name] for slot in taken)
        occupants = [
            Occupant(
                id, 0, BEGIN, len(share.slots), is_ending=False, is_preemptible=False,
                ends_s=None if run.limit is None else min(run.limit, run.predicted or run.limit) - self.now,
                limit_ends_s=None if run.limit is None else run.limit - self.now,
            )
            for id, (share, run) in here.items()
        ]  # fmt: skip
        free = tuple(slot for slot in range(self.slots[name]) if slot not in taken)
        return HostState(name, "cpu", self.slots[name], free, device_name="cpu", occupants=tuple(occupants))

    def schedule(self) -> SchedulingPlan:
        queue = [job._replace(head_hosts=self.kept.get(job.id, ())) for job in self.queue.values()]
        plan = plan_pass(queue, [self.build_host(name) for name in self.slots])
        self.kept = plan.head_hosts
        for placement in plan.placements:
            queued = self.queue.pop(placement.job)
            limit = None if queued.limit_s is None else self.now + queued.limit_s
            ends = self.now + self.lasts[queued.id]
            self.running[queued.id] = Run(placement.shares, ends if limit is None else min(ends, limit), None, limit)
            self.starts[queued.id] = self.now
            if placement.is_backfilled:
                self.backfilled.add(queued.id)
        return plan

    def advance(self) -> None:
        self.now += STEP_S
        self.running = {id: run for id, run in self.running.items() if run.ends > self.now}


def limited(id: str, slots: int, limit_s: int | None, **rest: object) -> QueuedJob:
    return job(id, slots, limit_s=limit_s, **rest)


def one_host(head_slots: int, *runs: tuple[int, float | None]) -> Board:
    """Create a host of four slots with a waiting head, and runs with their slots and time limits."""
    board, first = Board({"host-a": 4}), 0
    for number, (slots, limit) in enumerate(runs):
        share = Share("host-a", tuple(range(first, first + slots)))
        board.running[f"old-{number}"] = Run((share,), NEVER, None, limit)
        first += slots
    board.queue["head"] = job("head", head_slots, age=1)
    board.lasts["head"] = 1.0
    return board


def starts_now(board: Board, late: QueuedJob) -> bool:
    board.queue[late.id] = late
    board.lasts[late.id] = 1.0
    return late.id in {placement.job for placement in board.schedule().placements if placement.is_backfilled}


@pytest.mark.parametrize(
    ("old_limit", "late_limit", "is_backfilled"),
    [
        (1000.0, 900, True),
        (1000.0, 1000 - int(BACKFILL_MARGIN_S) + 1, False),
        (1000.0, None, False),
        (None, 10, False),
    ],
)
def test_short_job_runs_beside_a_head_that_waits_for_time_limits(
    old_limit: float | None, late_limit: int | None, is_backfilled: bool
) -> None:
    """The example of a host with 4 slots, 2 of them busy, and a first job that needs 4."""
    assert starts_now(one_host(4, (2, old_limit)), limited("late", 1, late_limit)) is is_backfilled


def test_job_without_limit_runs_on_slots_that_the_head_cannot_use() -> None:
    assert starts_now(one_host(3, (3, None)), limited("late", 1, None))
    assert not starts_now(one_host(3, (2, None), (1, None)), limited("late", 1, None)), "the run of 2 slots ends first"


def test_early_prediction_shortens_the_gap() -> None:
    board = one_host(4, (2, 10_000.0))
    board.running["old-0"] = board.running["old-0"]._replace(predicted=500.0)
    assert not starts_now(board, limited("late", 1, 600))
    assert starts_now(board, limited("later", 1, 400))


def test_plan_states_the_latest_start_of_the_head() -> None:
    assert one_host(4, (2, 600.0), (1, 300.0)).schedule().latest_starts == {"head": 600.0}
    assert one_host(4, (2, 600.0), (1, None)).schedule().latest_starts == {}


def test_forecast_includes_backfill() -> None:
    board = one_host(4, (2, 1000.0))
    shares = board.running["old-0"].shares
    queue = [board.queue["head"], limited("late", 2, 300), limited("second", 2, 300, age=-1)]
    running = [RunningAttempt("old-0", "default", shares, 1000.0, 1000.0)]
    found = forecast(queue, [board.build_host("host-a")], running, {"late": 300.0, "second": 300.0}, {})
    assert {id: start.in_s for id, start in found.items()} == {"late": 0.0, "second": 300.0, "head": 1000.0}


@st.composite
def some_board(draw: st.DrawFn, *, exact: bool) -> Board:
    """Draw hosts with runs, and a head that needs all these hosts."""
    board = Board({f"host-{letter}": draw(st.integers(1, 5)) for letter in "abc"[: draw(st.integers(1, 3))]})
    for name, slots in board.slots.items():
        first = 0
        while first < slots:
            size = draw(st.integers(1, slots - first))
            if draw(st.booleans()):
                share = Share(name, tuple(range(first, first + size)))
                limit = STEP_S * draw(st.integers(1, 9))
                ends = limit if exact else STEP_S * draw(st.integers(1, int(limit / STEP_S)))
                predicted = None if exact else draw(st.none() | st.sampled_from([STEP_S, limit, 3 * limit]))
                has_limit = draw(st.booleans())
                board.running[f"old-{name}-{first}"] = Run((share,), ends, predicted, limit if has_limit else None)
            first += size
    total = sum(board.slots.values())
    fewest = total - min(board.slots.values()) + 1 if len(board.slots) > 1 else 1  # so all hosts are reserved
    size = draw(st.integers(fewest, total))
    board.queue["head"] = job("head", size, age=1, max_hosts=0)
    board.lasts["head"] = NEVER
    return board


def copy_board(board: Board) -> Board:
    other = Board(board.slots)
    other.running, other.queue, other.lasts = dict(board.running), dict(board.queue), dict(board.lasts)
    return other


def run_with_later_jobs(data: st.DataObject, board: Board, *, exact: bool) -> float:
    """Let later jobs arrive until the head starts, and return the bound of its start when it first waited."""
    bound = float("inf")
    for step in range(MAX_PASSES):
        for number in range(data.draw(st.integers(0, 2))):
            id = f"late-{step}-{number}"
            limit = data.draw(st.none() | st.integers(1, 9).map(lambda n: int(STEP_S * n)))
            board.queue[id] = limited(id, data.draw(st.integers(1, 4)), limit, max_hosts=0, age=-step)
            lasts = NEVER if limit is None else limit if exact else data.draw(st.integers(1, limit))
            board.lasts[id] = lasts
        plan = board.schedule()
        if "head" in board.starts:
            return bound
        bound = min(bound, board.now + plan.latest_starts.get("head", float("inf")))
        board.advance()
    return bound


def get_start_without_later_jobs(board: Board) -> float:
    for _ in range(MAX_PASSES):
        board.schedule()
        if "head" in board.starts:
            break
        board.advance()
    return board.starts["head"]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_head_starts_as_early_as_without_backfill_if_ends_are_exact(data: st.DataObject) -> None:
    board = data.draw(some_board(exact=True))
    alone = copy_board(board)
    run_with_later_jobs(data, board, exact=True)
    assert board.starts["head"] == get_start_without_later_jobs(alone)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_head_starts_before_time_limits_despite_wrong_predictions(data: st.DataObject) -> None:
    """Jobs end early, and predictions are too early or too late. The head never starves."""
    board = data.draw(some_board(exact=False))
    bound = run_with_later_jobs(data, board, exact=False)
    assert board.starts["head"] <= bound


def test_scheduler_needs_no_framework() -> None:
    """The fleet simulation runs without settings."""
    code = "import sys, jobs.queue.scheduling.placement; assert 'django' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "."})
