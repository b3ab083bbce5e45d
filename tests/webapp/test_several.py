"""A web of several processes: one that is killed is replaced, and none outlives the one that began them."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes import RedisServer, gone, wait_until
from tests.support.web import site

pytestmark = pytest.mark.slow


def test_a_process_that_is_killed_is_replaced_and_none_outlives_their_parent(
    tmp_path: Path, redis_service: RedisServer
) -> None:
    database = f"sqlite:///{tmp_path}/db.sqlite3"
    with site(database, redis_service, tmp_path / "web", MESHBOARD_WEB_PROCESSES="2") as board:
        first = serving(board.process.pid)
        assert len(first) == 2
        with httpx.Client(base_url=board.url, headers=board.token("owner")) as client:
            killed = first.pop()
            killed.kill()
            wait_until(lambda: len(now := serving(board.process.pid)) == 2 and killed not in now, "another one")
            wait_until(lambda: answers(client), "an answer")

        left = serving(board.process.pid)
        board.process.send_signal(signal.SIGKILL)
        for process in left:
            wait_until(lambda pid=process.pid: gone(pid), "it ends with its parent")  # type: ignore[misc]


def serving(parent: int) -> set[psutil.Process]:
    """Its processes that answer requests; the interpreter has another that watches what they share."""
    found = set()
    for one in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie's has no command line either
            if "spawn_main" in " ".join(one.cmdline()):
                found.add(one)
    return found


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/api/v1/jobs").status_code == 200
    except httpx.TransportError:
        return False
