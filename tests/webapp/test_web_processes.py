"""Web service with several processes: a killed process is replaced, and all end with their parent."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.processes import RedisServer, is_gone, wait_until
from tests.support.web import Site, run_site

pytestmark = pytest.mark.slow


def test_replaces_a_killed_process_and_ends_with_the_parent(tmp_path: Path, redis_service: RedisServer) -> None:
    database = f"sqlite:///{tmp_path}/db.sqlite3"
    with run_site(database, redis_service, tmp_path / "web", MESHBOARD_WEB_PROCESSES="2") as board:
        first = serving(board.process.pid)
        assert len(first) == 2
        with httpx.Client(base_url=board.url, headers=board.build_token_header("owner")) as client:
            killed = first.pop()
            killed.kill()
            wait_until(lambda: len(now := serving(board.process.pid)) == 2 and killed not in now, "another one")
            wait_until(lambda: answers(client), "an answer")

        left = serving(board.process.pid)
        board.process.send_signal(signal.SIGKILL)
        for process in left:
            wait_until(lambda pid=process.pid: is_gone(pid), "it ends with its parent")  # type: ignore[misc]


def test_distributes_connections_over_processes(tmp_path: Path, redis_service: RedisServer) -> None:
    """96 connections go to two processes. A process gets fewer than 24 with a probability of 10^-6."""
    database = f"sqlite:///{tmp_path}/db.sqlite3"
    with (
        run_site(database, redis_service, tmp_path / "web", MESHBOARD_WEB_PROCESSES="2") as board,
        contextlib.ExitStack() as open_ones,
    ):
        processes = wait_until(lambda: both_listen(board), "both listen")
        for _ in range(96):
            open_ones.enter_context(socket.create_connection(("127.0.0.1", board.port)))
        counts = wait_until(lambda: all_taken(processes, board.port, 96), "all are taken")
        assert min(counts) >= 24, counts


def both_listen(board: Site) -> list[psutil.Process]:
    found = [
        one for one in serving(board.process.pid) if any(c.status == psutil.CONN_LISTEN for c in lines(one, board.port))
    ]
    return found if len(found) == 2 else []


def all_taken(processes: list[psutil.Process], port: int, number: int) -> list[int]:
    counts = [sum(c.status == psutil.CONN_ESTABLISHED for c in lines(one, port)) for one in processes]
    return counts if sum(counts) >= number else []


def lines(process: psutil.Process, port: int) -> list[Any]:
    """Return the connections to this port that a process has."""
    return [one for one in process.net_connections("tcp4") if one.laddr.port == port]


def serving(parent: int) -> set[psutil.Process]:
    """Return the processes that answer requests. The interpreter has another process that tracks shared resources."""
    found = set()
    for one in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line either
            if "spawn_main" in " ".join(one.cmdline()):
                found.add(one)
    return found


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/api/v1/jobs").status_code == 200
    except httpx.TransportError:
        return False
