"""Services of `make up`: no process of a dead service remains, and logs are truncated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import base_environment, is_gone, run_process, wait_until
from webapp.logs import truncate_log
from webapp.processes import ProcessManager, find_writers

RUNNER = """
import os, sys
from pathlib import Path
from webapp.processes import ProcessManager, Service
fleet = ProcessManager(Path(sys.argv[1]))
fleet.start(Service("service", [sys.executable, "-c", *sys.argv[2:]], dict(os.environ), Path.cwd()))
fleet.watch(lambda: None)
"""
# Celery's scheduler is a child process without a signal when its parent dies.
WITH_A_CHILD = """
import os, signal, sys, time
if os.fork() == 0:
    if "alone" in sys.argv:
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"child %d\\n" % os.getpid())
    time.sleep(600)
os.write(1, b"main %d\\n" % os.getpid())
time.sleep(600)
"""
LIMIT = 200_000
# Write fifteen times the limit, report it by a file, and stay alive.
CHATTERBOX = f"""
import os, pathlib, sys, time
for _ in range({15 * LIMIT // 1000}):
    os.write(1, b"x" * 999 + b"\\n")
    time.sleep(0.0003)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "log"
    ProcessManager(tmp_path / "log").stop_leftovers(["service"], 0)


def runner(logs: Path, *service: str, patch: str = "") -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", patch + RUNNER, str(logs), *service]
    return subprocess.Popen(argv, env=base_environment(), stdout=subprocess.DEVNULL)


def output(log: Path, word: str) -> list[int]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


@pytest.mark.parametrize("session", ["shared", "alone"])
def test_stops_children_of_a_killed_service(logs: Path, session: str) -> None:
    log = logs / "service.log"
    argv = [sys.executable, "-c", RUNNER, str(logs), WITH_A_CHILD, session]
    with run_process(argv, base_environment(), logs.parent / "runner.log"):
        wait_until(lambda: output(log, "main") and output(log, "child"), "the service runs")
        [main], [child] = output(log, "main"), output(log, "child")
        os.kill(main, signal.SIGKILL)
        wait_until(lambda: len(output(log, "main")) == len(output(log, "child")) == 2, "it is started again")
        assert is_gone(child)
        assert sorted(find_writers(log)) == sorted([output(log, "main")[1], output(log, "child")[1]])


def test_stops_processes_of_a_killed_runner(logs: Path) -> None:
    log = logs / "service.log"
    killed = runner(logs, WITH_A_CHILD, "alone")
    wait_until(lambda: output(log, "main") and output(log, "child"), "the service runs")
    [main], [child] = output(log, "main"), output(log, "child")
    os.kill(main, signal.SIGSTOP)  # so that the runner's death does not end it at once
    wait_until(lambda: ") T " in Path(f"/proc/{main}/stat").read_text(), "it has stopped")
    killed.kill()
    killed.wait()
    assert sorted(ProcessManager(logs).stop_leftovers(["service"], 0.2)["service"]) == sorted([main, child])
    assert is_gone(main)
    assert is_gone(child)
    assert ProcessManager(logs).stop_leftovers(["service"]) == {}


def test_does_not_stop_readers_of_a_log(logs: Path) -> None:
    logs.mkdir()
    (logs / "service.log").touch()
    with (logs / "service.log").open() as log, subprocess.Popen(["sleep", "600"], stdin=log, stderr=log) as reader:
        assert ProcessManager(logs).stop_leftovers(["service"]) == {}
        reader.kill()


def test_truncates_the_log_of_a_running_service(logs: Path) -> None:
    patch = "import webapp.processes as p, functools\n"
    patch += f"p.truncate_log = functools.partial(p.truncate_log, limit_bytes={LIMIT})\n"
    log, moved, written = logs / "service.log", logs / "service.log.1", logs.parent / "written"
    killed = runner(logs, CHATTERBOX, str(written), patch=patch)
    try:
        wait_until(written.exists, "the service has written fifteen times the limit")
        wait_until(lambda: log.stat().st_size <= LIMIT, "its log is cut", 5)
        assert moved.stat().st_size <= LIMIT
        assert len(find_writers(log)) == 1
    finally:
        killed.kill()
        killed.wait()


def test_truncation_keeps_the_end_and_the_writer(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(1000):
            writer.write(b"%03d\n" % number)
        truncate_log(log, 4000)
        assert not (tmp_path / "service.log.1").exists()
        writer.write(b"end\n")
        truncate_log(log, 4000)
        writer.write(b"more\n")
    assert log.read_bytes() == b"more\n"
    assert (tmp_path / "service.log.1").read_bytes().splitlines()[0] == b"001"
    assert (tmp_path / "service.log.1").read_bytes().endswith(b"end\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["service.log", "service.log.1"]
