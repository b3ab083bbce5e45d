"""The guardian where the host forbids PID namespaces: a supervisor's death still leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.processes import ROOT, wait_until
from workers.host.processes import COOKIE_VARIABLE, find_processes, kill_processes

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
