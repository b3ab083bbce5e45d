"""External runs of torchrun: a board that restarts, and counters of restarted ranks."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from contracts.names import telemetry_stream
from contracts.telemetry.items import SCRIPT_SETUP_STEPS, Cell, PhaseItem, TrafficItem
from tests.support.processes import scale_timeout, wait_until
from tests.support.web import TlsSite
from tests.workers.external_runs.conftest import items, metered, torchrun
from tests.workers.external_runs.train import NUMBERS
from webapp.runner import find_free_port
from workers.external_runs.child_process import RestartCounter
from workers.meter.exporter import StartReporter
from workers.meter.recorder import Recorder

STEP_BYTES = 40


def lines(board: TlsSite, run: str, rank: int) -> list[str]:
    logs = [item for item in items(board, run, "log") if item["rank"] == rank]
    assert all("skipped" not in item for item in logs)
    return [line for item in logs for line in item["lines"]]


def test_external_run_is_complete_after_a_board_restart(board: TlsSite, tmp_path: Path) -> None:
    with metered(board, tmp_path, "--name", "by hand", "--tag", "night", "--node-name", "laptop") as run:
        wait_until(lambda: "The run is reported when the board answers." in run.terminal, "the meter finds nobody")
        with board.serve():
            job = board.wait_for_status("by hand", "running")
            wait_until(lambda: lines(board, job["id"], 1), "its log is on the board")
        before = len(items(board, job["id"], "log"))
        wait_until(lambda: "reports are buffered" in run.terminal, "the meter notices that the board is away")
        seen = run.terminal.count("rank 0 step")
        wait_until(lambda: run.terminal.count("rank 0 step") > seen + 20, "training continues without the board")
        assert len(items(board, job["id"], "log")) == before
        with board.serve():
            wait_until(lambda: len(items(board, job["id"], "log")) > before, "the board hears of it again")
            run.enough()
            assert run.process.wait(scale_timeout(60)) == 0, run.terminal
            job = board.wait_for_status("by hand", "succeeded")
    assert (job["engine"], job["host"], job["reported"]["tags"]) == ("elsewhere", "laptop", ["night"])
    assert job["reported"]["command"][-1] == "0"
    for rank in (0, 1):
        expected = [f"rank {rank} step {step}" for step in range(1, run.steps(rank) + 1)]
        assert [line for line in lines(board, job["id"], rank) if line.startswith("rank")] == expected
        assert [f"[default{rank}]:{line}" in run.terminal for line in expected] == [True] * len(expected)
        cells = {(c["phase"], c["op"]): c for c in job["exit"]["summary"]["cells"][str(rank)]}
        reduced = [cells[phase, "all_reduce"] for phase in ("setup", "step")]
        assert sum(cell["payload_bytes"] for cell in reduced) == 4 * NUMBERS * run.steps(rank)
        metrics = [item for item in items(board, job["id"], "metric") if item["rank"] == rank]
        assert [(one["source"], one["step"], one["values"]) for one in metrics] == [
            ("log line", run.steps(rank), {"loss": rank + 0.5})
        ]
    entries: Any = board.redis.client().xrange(telemetry_stream(job["id"], 1))
    assert [int(fields[b"n"]) for _, fields in entries] == list(range(len(entries))), "each batch once, none missing"
    assert items(board, job["id"], "gap") == []
    assert run.terminal.count("does not answer") == 2, "each outage is reported once"
    assert run.terminal.count("The board answers again") == 1


@pytest.mark.slow
def test_names_the_failed_rank_of_two_nodes(serving: TlsSite, tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    command = torchrun(tmp_path, 1, f"127.0.0.1:{find_free_port()}", nodes=2)
    with contextlib.ExitStack() as stack:
        folders = {name: tmp_path / name for name in ("one", "other")}
        started = []
        for name, folder in folders.items():
            folder.mkdir()
            options = ("--name", "two nodes", "--key", "two nodes", "--node-name", name)
            started.append(stack.enter_context(metered(serving, folder, *options, command=command)))
        codes = [run.process.wait(scale_timeout(90)) for run in started]
        assert 1 in codes, [run.terminal for run in started]
    job = serving.wait_for_status("two nodes", "failed")
    assert (job["exit"]["rank"], job["exit"]["exit_code"]) == (1, 1)
    assert "ValueError: the loss is wrong" in job["exit"]["reason"]
    assert any("ValueError" in line for line in job["exit"]["log_tail"])
    assert [(member["node"], member["first_rank"]) for member in job["members"]] == [(0, 0), (1, 1)]
    assert {member["host"] for member in job["members"]} == {"one", "other"}
    for node in (0, 1):
        ranks = {item["rank"] for item in items(serving, job["id"], "traffic", node)}
        assert ranks == {node}, "each node reports only the rank on it"


@pytest.mark.extended
def test_two_nodes_of_any_launcher_are_one_run(serving: TlsSite, tmp_path: Path) -> None:
    """Check a launcher in a shell. The ranks report how many nodes there are."""
    command = torchrun(tmp_path, 0, f"127.0.0.1:{find_free_port()}", nodes=2)
    with contextlib.ExitStack() as stack:
        runs = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            options = ("--name", "shell", "--key", "shell", "--node-name", name, "--rank-timeout", "600")
            shell = ["bash", "-c", "exec " + shlex.join(command)]
            runs.append(stack.enter_context(metered(serving, tmp_path / name, *options, command=shell)))
        job = serving.wait_for_status("shell", "running")
        (tmp_path / "enough").touch()
        assert [run.process.wait(scale_timeout(90)) for run in runs] == [0, 0], [run.terminal for run in runs]
    job = serving.wait_for_status("shell", "succeeded")
    assert sorted((member["node"], member["first_rank"]) for member in job["members"]) == [(0, 0), (1, 1)]
    for node in (0, 1):
        assert {item["rank"] for item in items(serving, job["id"], "traffic", node)} == {node}


class Process:
    """A process of a rank, with the items of its meter."""

    def __init__(self, tries: RestartCounter) -> None:
        self._tries, self._recorder = tries, Recorder(0)
        StartReporter(0, tries.adjust).report("imported")

    def train(self, steps: int) -> tuple[int, list[Cell]]:
        """Run steps, and return the reported number of steps and the counters."""
        for step in range(steps):
            self._recorder.set_phase("step" if step >= SCRIPT_SETUP_STEPS else "setup")
            self._recorder.issue("all_reduce", "0", 2, STEP_BYTES)()
        result = PhaseItem(
            kind="phase", rank=0, time=0.0, phase="step", steps=steps, cells=self._recorder.get_cells("step")
        )
        traffic = TrafficItem(kind="traffic", rank=0, time=0.0, cells=self._recorder.get_cells(), dropped=0)
        for item in (result, traffic):
            self._tries.adjust(item)
        sent = [(cell["count"], cell["payload_bytes"]) for cell in traffic["cells"] if cell["phase"] == "step"]
        assert not sent or [(cell["count"], cell["payload_bytes"]) for cell in result["cells"]] == sent
        return result["steps"], traffic["cells"]


def test_counters_continue_after_restarts() -> None:
    tries = RestartCounter()
    Process(tries).train(6)
    assert Process(tries).train(1)[0] == 6, "its own first steps are set-up"
    steps, cells = Process(tries).train(4)
    counted = {cell["phase"]: (cell["count"], cell["completed"], cell["payload_bytes"]) for cell in cells}
    assert counted == {"setup": (5, 5, 5 * STEP_BYTES), "step": (6, 6, 6 * STEP_BYTES)}
    assert counted["step"][2] / (steps - SCRIPT_SETUP_STEPS) == STEP_BYTES


def test_step_items_continue_after_restarts() -> None:
    tries = RestartCounter()
    numbers = []
    for steps in (6, 4):
        Process(tries)
        for number in range(2, steps + 1):
            item: Any = {"kind": "step", "rank": 0, "step": number, "ran": number, "counted": number - 2, "cells": []}
            tries.adjust(item)
            numbers.append((item["step"], item["ran"], item["counted"]))
    assert numbers[4:] == [(6, 6, 4), (6, 6, 4), (7, 7, 5), (8, 8, 6)], "the set-up steps repeat steps"


def test_restart_during_setup_counts_no_step_twice() -> None:
    tries = RestartCounter()
    Process(tries).train(1)
    assert Process(tries).train(3)[0] == 3
