"""A supervisor that is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.host import host
from tests.support.processes import RedisServer, wait_until

ONE_RANK = {"model": {"preset": "gpt-tiny"}}


def test_its_socket_is_gone(redis_service: RedisServer, tmp_path: Path) -> None:
    """Once each such supervisor left a folder below TMPDIR for good."""
    with host(redis_service, tmp_path, "tests.workers.stubborn", TMPDIR=str(tmp_path)) as machine, machine.worker():
        attempt = machine.order("killed", spec=ONE_RANK)
        wait_until(lambda: list(tmp_path.glob("meshboard-*/telemetry")), "the socket is there")
        supervisor = attempt.supervisor_id()
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        assert machine.exit_of("killed")["outcome"] == "lost"
        assert list(tmp_path.glob("meshboard-*")) == []
