"""What is killed leaves nothing behind for good: neither a supervisor its socket, nor a job its stream."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from contracts.names import telemetry_stream
from tests.support.host import host
from tests.support.processes import RedisServer, wait_until
from workers.host import processes

ONE_RANK = {"model": {"preset": "gpt-tiny"}}


def test_a_killed_supervisors_socket_is_gone(
    redis_service: RedisServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Once each such supervisor left a folder below TMPDIR for good."""
    short = tmp_path_factory.mktemp("t")  # a longer one is not taken for sockets
    with host(redis_service, tmp_path, "tests.workers.stubborn", TMPDIR=str(short)) as machine, machine.worker():
        attempt = machine.order("killed", spec=ONE_RANK)
        wait_until(lambda: list(short.glob("meshboard-*/telemetry")), "the socket is there")
        supervisor = attempt.supervisor_id()
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        assert machine.exit_of("killed")["outcome"] == "lost"
        assert list(short.glob("meshboard-*")) == []


def test_a_stream_lost_shortly_before_the_end_expires_all_the_same(redis_service: RedisServer, tmp_path: Path) -> None:
    client, stream = redis_service.client(), telemetry_stream("ending", 1)
    with host(redis_service, tmp_path, "tests.workers.stubborn") as machine, machine.worker():
        attempt = machine.order("ending", spec=ONE_RANK)
        wait_until(lambda: machine.items("ending", "log") and client.ttl(stream) > 0, "its lines are in the stream")
        client.delete(stream)
        with (attempt.logs / "launcher.log").open("a") as launcher:
            launcher.write("after the loss\n")
        for pid in machine.processes("ending"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert machine.exit_of("ending")["outcome"] == "failed"
        assert client.exists(stream)
        assert client.ttl(stream) > 0


def test_what_may_not_be_killed_is_told_as_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's own, such as what sudo left behind: the end of the run was never told."""

    def refuses(_pid: int, _signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "processes_of", lambda *_asked: [12345])
    monkeypatch.setattr(processes.os, "kill", refuses)
    assert processes.sweep("j", 1, timeout_s=0.05) == [12345]
