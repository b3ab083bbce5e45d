"""The guardian where the host forbids PID namespaces: a supervisor's death still leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT, wait_until
from workers.host.processes import COOKIE, processes_of, sweep

# Ignores TERM, moves to a session of its own and forks twice: four processes.
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
import os, subprocess, sys, time
read_end, lifeline = os.pipe()
guardian = [sys.executable, "-m", "workers.host.guardian", str(read_end), sys.argv[2]]
guardian += [sys.executable, "-c", sys.argv[1]]
subprocess.Popen(guardian, pass_fds=(read_end,), start_new_session=True)
os.close(read_end)
time.sleep(600)
"""


def test_killing_the_supervisor_ends_even_what_hid_in_another_session(tmp_path: Path) -> None:
    environment = {**os.environ, COOKIE: "guarded/1"}
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, HIDING, str(tmp_path / "ended")], cwd=ROOT, env=environment
    )
    try:
        wait_until(lambda: len(processes_of("guarded", 1)) == 5, "the guardian and its family run")
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: not processes_of("guarded", 1), "nothing is left", 1, 0.01)
    finally:
        supervisor.kill()
        supervisor.wait()
        sweep("guarded", 1)
