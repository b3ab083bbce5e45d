"""External runs of torchrun, and a board that restarts during the run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from contracts.names import telemetry_stream
from tests.support.processes import scale_timeout, wait_until
from tests.support.web import TlsSite
from tests.workers.external_runs.conftest import items, metered, torchrun
from tests.workers.external_runs.train import NUMBERS
from webapp.runner import find_free_port


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
