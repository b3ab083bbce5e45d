"""Stands between the supervisor and torchrun: when the supervisor is gone, so is everything below.

Run as PID 1 of a PID namespace where the host allows one: the kernel then kills every rank with it, whatever
session or double fork it hid in. Elsewhere it is a subreaper and sweeps by the attempt's cookie.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

from workers import rank_environment
from workers.host.processes import COOKIE, RUNS, sweep

PR_SET_CHILD_SUBREAPER = 36
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def namespace_prefix() -> list[str]:
    """The command that gives a child its own PID namespace, empty where the host does not allow one."""
    for extra in ([], ["--user", "--map-current-user"]):
        trial = [*UNSHARE, *extra, "true"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(trial, capture_output=True, timeout=10, check=False).returncode == 0:
                return trial[:-1]
    return []


def main() -> int:
    """argv: FD of a socket to the supervisor, the command.

    A byte from there means TERM; its end, that the supervisor is gone. We send the command's exit code as text (-N:
    signal N). Our own exit status says nothing: unshare 2.38 does not pass on how its child died.
    """
    rank_environment.block_sigterm()
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(lifeline, False)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        os.write(lifeline, b"127")
        return 0
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if lifeline in ready:
                if not os.read(lifeline, 1):
                    return _end(child.pid)
                _terminate(child.pid)
            if wake_read in ready:
                os.read(wake_read, 4096)
            status = _reap(child.pid)
            if status is not None:
                _end(child.pid)
                with contextlib.suppress(OSError):  # nobody is left to hear it
                    os.write(lifeline, str(os.waitstatus_to_exitcode(status)).encode())
                return 0


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left but root's own
        os.killpg(pid, signal.SIGTERM)


def _reap(main_pid: int) -> int | None:
    """Collect every dead child; the main one's status once it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main_pid:
                found = status
    return found


def _end(main_pid: int) -> int:
    """Nothing of the attempt outlives this."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left but root's own
        os.killpg(main_pid, signal.SIGKILL)
    job, _, attempt = os.environ[COOKIE].partition("/")
    runs = os.environ.get(RUNS)
    sweep(job, int(attempt), runs=Path(runs) if runs else None)
    return 1


if __name__ == "__main__":
    sys.exit(main())
