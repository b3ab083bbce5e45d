"""Cleanup after killed processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from contracts.names import telemetry_stream
from tests.support.host import run_host
from tests.support.processes import RedisServer, wait_until
from workers.host import processes

ONE_RANK = {"model": {"preset": "gpt-tiny"}}


def test_removes_the_socket_folder_of_a_killed_supervisor(
    redis_service: RedisServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = tmp_path_factory.mktemp("t")  # a longer one is not taken for sockets
    with (
        run_host(redis_service, tmp_path, "tests.workers.term_ignoring_script", TMPDIR=str(short)) as machine,
        machine.run_worker(),
    ):
        attempt = machine.send_launch_order("killed", spec=ONE_RANK)
        wait_until(lambda: list(short.glob("meshboard-*/telemetry")), "the socket is there")
        supervisor = attempt.get_supervisor()
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        assert machine.wait_for_exit("killed")["outcome"] == "lost"
        assert list(short.glob("meshboard-*")) == []


def test_stream_lost_shortly_before_the_end_expires(redis_service: RedisServer, tmp_path: Path) -> None:
    client, stream = redis_service.client(), telemetry_stream("ending", 1)
    with run_host(redis_service, tmp_path, "tests.workers.term_ignoring_script") as machine, machine.run_worker():
        attempt = machine.send_launch_order("ending", spec=ONE_RANK)
        wait_until(
            lambda: machine.read_items("ending", "log") and client.ttl(stream) > 0, "its lines are in the stream"
        )
        client.delete(stream)
        with (attempt.logs / "launcher.log").open("a") as launcher:
            launcher.write("after the loss\n")
        for pid in machine.list_processes("ending"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert machine.wait_for_exit("ending")["outcome"] == "failed"
        assert client.exists(stream)
        assert client.ttl(stream) > 0


def test_returns_processes_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check processes of root, such as those that sudo leaves."""

    def refuses(_pid: int, _signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "find_processes", lambda *_asked: [12345])
    monkeypatch.setattr(processes.os, "kill", refuses)
    assert processes.kill_processes("j", 1, timeout_s=0.05) == [12345]
