"""Services kept alive together: nothing of a dead one stays, and no log grows for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import base_environment, gone, running, wait_until
from webapp.logs import bound
from webapp.up.processes import Fleet, writers_of

RUNNER = """
import os, sys
from pathlib import Path
from webapp.up.processes import Child, Fleet
fleet = Fleet(Path(sys.argv[1]))
fleet.start(Child("service", [sys.executable, "-c", *sys.argv[2:]], dict(os.environ), Path.cwd()))
fleet.watch(lambda: None)
"""
# As Celery's controller was: its scheduler is a child that nobody tells when it dies.
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
# Writes fifteen times the limit, says so by a file, and lives on.
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
    Fleet(tmp_path / "log").end_leftovers(["service"], 0)


def runner(logs: Path, *service: str, patch: str = "") -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", patch + RUNNER, str(logs), *service]
    return subprocess.Popen(argv, env=base_environment(), stdout=subprocess.DEVNULL)


def said(log: Path, word: str) -> list[int]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


@pytest.mark.parametrize("session", ["shared", "alone"])
def test_a_service_killed_outright_leaves_no_child_beside_the_next_one(logs: Path, session: str) -> None:
    log = logs / "service.log"
    argv = [sys.executable, "-c", RUNNER, str(logs), WITH_A_CHILD, session]
    with running(argv, base_environment(), logs.parent / "runner.log"):
        wait_until(lambda: said(log, "main") and said(log, "child"), "the service runs")
        [main], [child] = said(log, "main"), said(log, "child")
        os.kill(main, signal.SIGKILL)
        wait_until(lambda: len(said(log, "main")) == len(said(log, "child")) == 2, "it is started again")
        assert gone(child)
        assert sorted(writers_of(log)) == sorted([said(log, "main")[1], said(log, "child")[1]])


def test_the_next_runner_ends_what_a_killed_one_left(logs: Path) -> None:
    log = logs / "service.log"
    killed = runner(logs, WITH_A_CHILD, "alone")
    wait_until(lambda: said(log, "main") and said(log, "child"), "the service runs")
    [main], [child] = said(log, "main"), said(log, "child")
    os.kill(main, signal.SIGSTOP)  # so that the runner's death does not end it at once
    wait_until(lambda: ") T " in Path(f"/proc/{main}/stat").read_text(), "it has stopped")
    killed.kill()
    killed.wait()
    assert sorted(Fleet(logs).end_leftovers(["service"], 0.2)["service"]) == sorted([main, child])
    assert gone(main)
    assert gone(child)
    assert Fleet(logs).end_leftovers(["service"]) == {}


def test_a_log_that_somebody_reads_is_not_a_service_s(logs: Path) -> None:
    logs.mkdir()
    (logs / "service.log").touch()
    with (logs / "service.log").open() as log, subprocess.Popen(["sleep", "600"], stdin=log, stderr=log) as reader:
        assert Fleet(logs).end_leftovers(["service"]) == {}
        reader.kill()


def test_a_log_stays_bounded_while_its_service_goes_on(logs: Path) -> None:
    patch = f"import webapp.up.processes as p, functools; p.bound = functools.partial(p.bound, limit_bytes={LIMIT})\n"
    log, moved, written = logs / "service.log", logs / "service.log.1", logs.parent / "written"
    killed = runner(logs, CHATTERBOX, str(written), patch=patch)
    try:
        wait_until(written.exists, "the service has written fifteen times the limit")
        wait_until(lambda: log.stat().st_size <= LIMIT, "its log is cut", 5)
        assert moved.stat().st_size <= LIMIT
        assert len(writers_of(log)) == 1
    finally:
        killed.kill()
        killed.wait()


def test_moving_a_log_keeps_its_end_and_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    with log.open("ab", buffering=0) as writer:
        for number in range(1000):
            writer.write(b"%03d\n" % number)
        bound(log, 4000)
        assert not (tmp_path / "service.log.1").exists()
        writer.write(b"end\n")
        bound(log, 4000)
        writer.write(b"more\n")
    assert log.read_bytes() == b"more\n"
    assert (tmp_path / "service.log.1").read_bytes().splitlines()[0] == b"001"
    assert (tmp_path / "service.log.1").read_bytes().endswith(b"end\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["service.log", "service.log.1"]
