"""A process between the supervisor and torchrun that kills all processes below it when the supervisor ends.

If the host allows it, the guardian is PID 1 of a PID namespace. The kernel then kills every rank with it, whatever
session or double fork the rank used. Otherwise the guardian is a subreaper, and kills by the attempt's cookie.
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
from workers.host.processes import COOKIE_VARIABLE, RUN_DIR_VARIABLE, kill_processes

PR_SET_CHILD_SUBREAPER = 36
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def build_namespace_prefix() -> list[str]:
    """Return a command that gives its child a PID namespace. Empty if the host does not allow one."""
    for extra in ([], ["--user", "--map-current-user"]):
        trial = [*UNSHARE, *extra, "true"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(trial, capture_output=True, timeout=10, check=False).returncode == 0:
                return trial[:-1]
    return []


def main() -> int:
    """Run a command until it or the supervisor ends.

    argv has the descriptor of a socket to the supervisor, and the command. A byte from the supervisor means TERM, and
    the end of the socket means that the supervisor ended. The guardian sends the command's exit code as text, -N for
    signal N. Its own exit status is not used, because unshare 2.38 does not return the status of its child.
    """
    rank_environment.block_sigterm()
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(supervisor, False)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        child = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        os.write(supervisor, b"127")
        return 0
    with selectors.DefaultSelector() as selector:
        selector.register(supervisor, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if supervisor in ready:
                if not os.read(supervisor, 1):
                    _kill_all(child.pid)
                    return 1
                _send_signal(child.pid, signal.SIGTERM)
            if wake_read in ready:
                os.read(wake_read, 4096)
            status = _reap(child.pid)
            if status is not None:
                _kill_all(child.pid)
                with contextlib.suppress(OSError):  # the supervisor has ended
                    os.write(supervisor, str(os.waitstatus_to_exitcode(status)).encode())
                return 0


def _send_signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # only processes of root are left
        os.killpg(group, number)


def _reap(main_pid: int) -> int | None:
    """Collect every dead child. Return the status of the main child if it is among them."""
    main_status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main_pid:
                main_status = status
    return main_status


def _kill_all(main_pid: int) -> None:
    """Kill every process of the attempt."""
    _send_signal(main_pid, signal.SIGKILL)
    job, _, attempt = os.environ[COOKIE_VARIABLE].partition("/")
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    kill_processes(job, int(attempt), run_dir=Path(run_dir) if run_dir else None)


if __name__ == "__main__":
    sys.exit(main())
