"""Group timeouts, SIGTERM from the parent only, and the guardian without PID namespaces."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.processes import ROOT, scale_timeout, wait_until
from workers.host.processes import COOKIE_VARIABLE, find_processes, kill_processes
from workers.rank_environment import GROUP_TIMEOUT_VARIABLE, TERM_FROM_PARENT_VARIABLE, get_group_timeout

WORKERS = Path(__file__).parents[2] / "workers"
DRY_RUN = WORKERS / "dry_run.py"  # no rank waits there
SHIELDED = """
import os, signal, sys, time
from workers import rank_environment
if sys.argv[1] == "guardian":
    import subprocess
    rank_environment.block_sigterm()
    child = subprocess.Popen([sys.executable, "-c", sys.stdin.read(), "rank"], stdin=subprocess.PIPE)
    print(child.pid, flush=True)
    signal.sigwait({signal.SIGUSR1})
    print("the parent ends it", flush=True)
    child.terminate()
    sys.exit(child.wait())
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"is ended\\n"), os._exit(1)))
signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"goes on\\n"))
rank_environment.accept_sigterm_from_parent()
while True:
    time.sleep(0.02)
"""
# Ignores SIGTERM, moves to a new session and forks twice, which makes four processes.
HIDING = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    os.fork()
while True:
    time.sleep(1)
"""
SUPERVISOR = """
import socket, subprocess, sys, time
lifeline, theirs = socket.socketpair()
guardian = [sys.executable, "-m", "workers.host.guardian", str(theirs.fileno()), sys.executable, "-c", sys.argv[1]]
subprocess.Popen(guardian, pass_fds=(theirs.fileno(),), start_new_session=True)
theirs.close()
time.sleep(600)
"""


def test_every_group_has_the_timeout() -> None:
    missing, seen = [], 0
    for path in WORKERS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr
            if named not in ("new_group", "init_process_group") or path == DRY_RUN:
                continue
            seen += 1
            if "timeout" not in {keyword.arg for keyword in node.keywords}:  # type: ignore[attr-defined]
                missing.append(f"{path.relative_to(WORKERS)}:{node.lineno}")  # type: ignore[attr-defined]
    assert seen > 8
    assert missing == []


def test_timeout_is_a_setting_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_group_timeout() == timedelta(minutes=10)
    monkeypatch.setenv(GROUP_TIMEOUT_VARIABLE, "7")
    assert get_group_timeout() == timedelta(seconds=7)


@pytest.fixture
def guardian(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Start a guardian that ends its child by SIGTERM on request. Both print what they do."""
    monkeypatch.setenv(TERM_FROM_PARENT_VARIABLE, "1")
    argv = [
        sys.executable,
        "-c",
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})" + SHIELDED,
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*argv, "guardian"], cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(SHIELDED.encode())
    process.stdin.close()
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its child too, where a test failed
    process.wait()


def test_only_sigterm_of_the_parent_ends_the_child(guardian: subprocess.Popen[bytes]) -> None:
    assert guardian.stdout is not None
    rank = int(guardian.stdout.readline())
    for pid in (guardian.pid, rank):
        os.kill(pid, signal.SIGTERM)  # this process is the parent of the guardian, which ignores it
    wait_until(lambda: not _pending(rank), "the rank has taken it")
    os.kill(rank, signal.SIGWINCH)
    assert guardian.stdout.readline() == b"goes on\n"
    guardian.send_signal(signal.SIGUSR1)
    assert guardian.wait(scale_timeout(20)) == 1
    assert guardian.stdout.read().decode().splitlines() == ["the parent ends it", "is ended"]


def _pending(pid: int) -> bool:
    """Return True if SIGTERM is pending."""
    with open(f"/proc/{pid}/status") as status:
        bits = next(line for line in status if line.startswith("ShdPnd"))
    return bool(int(bits.split()[1], 16) & 1 << (signal.SIGTERM - 1))


def test_killing_the_supervisor_ends_even_what_hid_in_another_session() -> None:
    environment = {**os.environ, COOKIE_VARIABLE: "guarded/1"}
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, HIDING], cwd=ROOT, env=environment)
    try:
        wait_until(lambda: len(find_processes("guarded", 1)) == 5, "the guardian and its family run")
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: not find_processes("guarded", 1), "nothing is left", 1, 0.01)
    finally:
        supervisor.kill()
        supervisor.wait()
        kill_processes("guarded", 1)
