"""Stalled ranks report their position, and the host reports ranks that cannot."""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.control import VERSION, LaunchOrder
from contracts.telemetry.batches import Item
from contracts.telemetry.items import MAX_RECENT_CALLS
from tests.support.processes import ROOT, scale_timeout
from workers.host.supervisor.health import RankMonitor
from workers.host.supervisor.telemetry_server import TelemetryServer
from workers.meter.monitors import (
    MAX_STACK_FRAMES,
    MAX_STALL_GROUPS,
    STALL_S,
    StallMonitor,
    get_last_report,
    get_stall,
)
from workers.meter.recorder import Recorder

NOTICED_S = scale_timeout(60)  # they import torch first


def still(recorder: Recorder, seconds: float) -> None:
    """Move the last progress into the past."""
    recorder.last_progress_s -= seconds


def test_reports_repeatedly_during_a_stall_and_once_at_its_end():
    recorder = Recorder(rank=3)
    watch = StallMonitor(recorder)
    assert watch.poll() is None
    still(recorder, STALL_S)
    first = watch.poll()
    assert first is not None
    assert STALL_S <= first["still"] < STALL_S + 10
    assert watch.poll() is None, "not twice within its period"
    watch._reported_s -= STALL_S
    assert watch.poll() is not None
    recorder.issue("all_reduce", "0", 2, 8)
    moved = watch.poll()
    assert moved is not None
    assert moved["still"] == 0
    assert watch.poll() is None


def test_every_event_is_progress():
    recorder = Recorder(rank=0)
    pending = recorder.issue("all_reduce", "0", 2, 8)
    for move in (
        pending,
        lambda: recorder.set_phase("eval"),
        lambda: recorder.begin_step(1),
        lambda: recorder.issue("send", "0", 2, 8, peer=1),
    ):
        still(recorder, 1000)
        before = recorder.last_progress_s
        move()
        assert recorder.last_progress_s > before + 500


def test_reports_oldest_collective_in_flight_of_each_group():
    recorder = Recorder(rank=0)
    recorder.end_step(41)
    for number in range(MAX_STALL_GROUPS + 5):
        recorder.add_group(f"{number}", [0, 1])
        recorder.issue("barrier", f"{number}", 2, 0)()
    recorder.issue("all_gather", f"{MAX_STALL_GROUPS + 4}", 2, 64)
    recorder.issue("all_reduce", f"{MAX_STALL_GROUPS + 4}", 2, 8)
    recorder.blocking = recorder.issue("recv", "0", 2, 4, peer=1)
    result = get_stall(recorder, 5.0)
    assert (result["step"], result["phase"], result["still"], len(result["groups"])) == (
        41,
        "setup",
        5.0,
        MAX_STALL_GROUPS,
    )
    first, second, third, *_ = result["groups"]
    assert (first["op"], first["peer"], first["sequence"], first["blocking"]) == ("recv", 1, 1, True)
    assert (first["issued"], first["ended"]) == (1, 1), "a receive does not count as a collective"
    assert (second["op"], second["payload_bytes"], second["sequence"], second["blocking"]) == (
        "all_gather",
        64,
        2,
        False,
    )
    assert (second["issued"], second["ended"]) == (3, 1)
    assert "op" not in third


def test_describes_the_last_calls_with_sizes_that_must_be_equal():
    recorder = Recorder(rank=0)
    recorder.add_group("0", [4, 5])
    for number in range(20):
        recorder.issue("all_reduce", "0", 2, 4 * number, dtype=torch.float32)()
    recorder.issue("broadcast", "0", 2, 8, dtype=torch.int64, root=1)()
    recorder.issue("all_to_all", "0", 2, 8, dtype=torch.int64)()
    recorder.undo_issue(recorder.issue("all_reduce", "0", 2, 8), None)
    recorder.issue("send", "0", 2, 8, peer=1)
    recorder.issue("barrier", "0", 2, 0)
    (progress,) = get_stall(recorder, 5.0)["groups"]
    assert len(progress["recent"]) == MAX_RECENT_CALLS
    assert progress["recent"][-4:] == [
        "all_reduce of 19 float32",
        "broadcast of 1 int64 from rank 5",
        "all_to_all of int64",
        "barrier",
    ]
    assert progress["issued"] == 23, "the number of the last one"


def test_last_report_has_the_line_and_the_exception(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def fail():\n    raise ValueError('bad sample 17')\nfail()\n")
    with pytest.raises(ValueError, match="bad sample 17") as error:
        runpy.run_path(str(script))
    result = get_last_report(Recorder(rank=0), error.value)
    assert (result["still"], result["ended"]) == (0, "ValueError: bad sample 17")
    assert result["stack"][-1] == f"{script}:2 in fail"
    assert result["source"] == "raise ValueError('bad sample 17')"
    assert get_last_report(Recorder(rank=0), None)["ended"] == ""


def test_reports_innermost_frames_of_a_deep_stack():
    recorder = Recorder(rank=0)

    def deeper(levels: int) -> list[str]:
        return deeper(levels - 1) if levels else get_stall(recorder, 0.0)["stack"]

    stack = deeper(100)
    assert len(stack) == MAX_STACK_FRAMES
    assert stack[0].endswith("deeper")
    assert stack[-1].rpartition(" in ")[2] == "get_stall"


class Host:
    """Reports and processes of three ranks, as a supervisor sees them."""

    def __init__(self, folder: Path) -> None:
        self.items: list[Any] = []
        self.ranks = RankMonitor(self.items.append)
        order = LaunchOrder(v=VERSION, job="stuck", attempt=1, spec={}, slots=[0, 1, 2], expires=0.0)
        self.telemetry = TelemetryServer(order, self._take, lambda _count: None, self.ranks.record_contact)
        self.socket = folder / "s"

    async def _take(self, items: list[Item]) -> None:
        for item in items:
            self.ranks.add(item)
            self.items.append(item)

    async def until(self, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + NOTICED_S
        while not seen():
            assert time.monotonic() < deadline, [item for item in self.items if item["kind"] in ("standing", "process")]
            await self.ranks.check()
            await asyncio.sleep(0.2)

    def last(self, kind: str, rank: int) -> Any:
        return next((item for item in reversed(self.items) if (item["kind"], item["rank"]) == (kind, rank)), None)


def started(folder: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-W", "ignore", "-m", "tests.workers.meter.stuck"]
    return [subprocess.Popen([*argv, str(rank), str(port), str(folder / "s")], cwd=ROOT) for rank in range(3)]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Return the host after all ranks stalled and a signal stopped rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))

        async def watch() -> None:
            server = await host.telemetry.start(host.socket, None)
            await host.until(lambda: all(host.last("standing", rank) for rank in (0, 1)))
            await host.until(lambda: bool((host.last("process", 2) or {"stack": []})["stack"]))
            os.kill(processes[1].pid, signal.SIGSTOP)
            host.items.append({"kind": "stopped now", "rank": 1})
            await host.until(lambda: bool((host.last("process", 1) or {"stack": []})["stack"]))
            server.close()

        processes = started(Path(folder))
        try:
            asyncio.run(watch())
            yield host
        finally:
            for process in processes:
                process.kill()
                process.wait()


def test_rank_reports_the_collective_that_it_waits_for(host: Host) -> None:
    result = host.last("standing", 0)
    (world,) = result["groups"]
    assert world["group"] == {"axis": "world", "ranks": [0, 1, 2], "nth": 0}
    assert (world["issued"], world["ended"], world["sequence"]) == (2, 1, 2)
    assert (world["op"], world["payload_bytes"], world["blocking"]) == ("all_reduce", 1000, True)
    assert "peer" not in world
    assert 0 <= result["time"] - world["since"] - result["still"] < 1
    assert result["phase"] == "step"
    stack = [line.rpartition(" in ")[2] for line in result["stack"]]
    assert stack.index("main") < stack.index("enters_alone") < stack.index("time_wait")
    assert "stuck.py:" in next(line for line in result["stack"] if line.endswith("enters_alone"))
    stood = next(at for at, item in enumerate(host.items) if (item["kind"], item["rank"]) == ("standing", 0))
    actual = [item for item in host.items[stood:] if item["kind"] == "process" and item["rank"] == 0]
    assert actual, "the host reports the process of a stalled rank"
    assert {item["state"] for item in actual} == {"sleeping"}


def test_rank_that_skipped_the_collective_reports_its_position(host: Host) -> None:
    result = host.last("standing", 1)
    (world,) = result["groups"]
    assert (world["issued"], world["ended"]) == (1, 1)
    assert "op" not in world
    assert result["stack"][-1].endswith("in sleeps_elsewhere")


@pytest.mark.skipif(shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="needs py-spy")
def test_host_reports_stack_of_rank_that_holds_the_gil(host: Host) -> None:
    result = host.last("process", 2)
    assert result["silent_s"] >= 3
    stood = host.last("standing", 2)  # for others it may have waited before
    assert stood is None or stood["time"] < result["time"] - result["silent_s"] + 1
    assert result["state"] == "sleeping"
    assert result["cpu"] < 0.5
    assert [line.rpartition(" in ")[2] for line in result["stack"]][-2:] == ["main", "holds_the_interpreter"]


def test_host_reports_stopped_rank(host: Host) -> None:
    stopped = host.items.index({"kind": "stopped now", "rank": 1})
    before = [item["state"] for item in host.items[:stopped] if item["kind"] == "process" and item["rank"] == 1]
    assert "stopped" not in before
    result = host.last("process", 1)
    assert result["state"] == "stopped"
    assert result["stack"][-1].endswith("in sleeps_elsewhere")


def test_each_rank_reports_its_memory(host: Host) -> None:
    for rank in range(3):
        result = host.last("gauge", rank)
        assert result["resident_bytes"] > 50 * 2**20, "torch alone is more"
        assert "allocated_bytes" not in result
