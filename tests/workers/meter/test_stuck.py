"""Stalled ranks report their position, and the host reports ranks that cannot."""

from __future__ import annotations

import asyncio
import os
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

from contracts.control import VERSION, LaunchOrder
from contracts.telemetry.batches import Item
from tests.support.processes import ROOT, scale_timeout
from workers.host.supervisor.health import RankMonitor
from workers.host.supervisor.telemetry_server import TelemetryServer

NOTICED_S = scale_timeout(60)  # they import torch first


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
    told = host.last("standing", 0)
    (world,) = told["groups"]
    assert world["group"] == {"axis": "world", "ranks": [0, 1, 2], "nth": 0}
    assert (world["issued"], world["ended"], world["sequence"]) == (2, 1, 2)
    assert (world["op"], world["payload_bytes"], world["blocking"]) == ("all_reduce", 1000, True)
    assert "peer" not in world
    assert 0 <= told["time"] - world["since"] - told["still"] < 1
    assert told["phase"] == "step"
    stack = [line.rpartition(" in ")[2] for line in told["stack"]]
    assert stack.index("main") < stack.index("enters_alone") < stack.index("time_wait")
    assert "stuck.py:" in next(line for line in told["stack"] if line.endswith("enters_alone"))
    stood = next(at for at, item in enumerate(host.items) if (item["kind"], item["rank"]) == ("standing", 0))
    ours = [item for item in host.items[stood:] if item["kind"] == "process" and item["rank"] == 0]
    assert ours, "the host reports the process of a stalled rank"
    assert {item["state"] for item in ours} == {"sleeping"}


def test_rank_that_skipped_the_collective_reports_its_position(host: Host) -> None:
    told = host.last("standing", 1)
    (world,) = told["groups"]
    assert (world["issued"], world["ended"]) == (1, 1)
    assert "op" not in world
    assert told["stack"][-1].endswith("in sleeps_elsewhere")


@pytest.mark.skipif(shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="needs py-spy")
def test_host_reports_stack_of_rank_that_holds_the_gil(host: Host) -> None:
    told = host.last("process", 2)
    assert told["silent_s"] >= 3
    stood = host.last("standing", 2)  # for others it may have waited before
    assert stood is None or stood["time"] < told["time"] - told["silent_s"] + 1
    assert told["state"] == "sleeping"
    assert told["cpu"] < 0.5
    assert [line.rpartition(" in ")[2] for line in told["stack"]][-2:] == ["main", "holds_the_interpreter"]


def test_host_reports_stopped_rank(host: Host) -> None:
    stopped = host.items.index({"kind": "stopped now", "rank": 1})
    before = [item["state"] for item in host.items[:stopped] if item["kind"] == "process" and item["rank"] == 1]
    assert "stopped" not in before
    told = host.last("process", 1)
    assert told["state"] == "stopped"
    assert told["stack"][-1].endswith("in sleeps_elsewhere")


def test_each_rank_reports_its_memory(host: Host) -> None:
    for rank in range(3):
        told = host.last("gauge", rank)
        assert told["resident_bytes"] > 50 * 2**20, "torch alone is more"
        assert "allocated_bytes" not in told
