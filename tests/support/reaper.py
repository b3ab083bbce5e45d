"""Kill all processes that a suite started, when the suite ends or a signal ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

import psutil

from jobs.core.child_processes import exit_with_parent

PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>
SI_KERNEL = 0x80  # `si_code` of a signal from a terminal, which its whole foreground group receives
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
MAX_KILL_S = 10.0


def fork_under_reaper() -> None:
    """Return in a forked child. The parent waits, kills all descendants of the child, and exits with its status.

    Fixtures cannot do this alone: xdist kills workers that need longer than 10 s after Ctrl-C, and SIGTERM ends pytest
    at once. Boards and host workers have their own sessions, and supervisors outlive the host worker.
    """
    if threading.active_count() > 1:  # A fork would lose the threads, for example those of a debugger.
        return
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # Orphans of the child become children of this process.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        exit_with_parent(parent)
        return
    status = _wait(child)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _wait(child: int) -> int:
    """Pass signals on to the child until it ends, and return its wait status."""
    while True:
        info = signal.sigwaitinfo(HANDLED_SIGNALS)
        if info.si_signo != signal.SIGCHLD:
            if info.si_code != SI_KERNEL:
                os.kill(child, info.si_signo)
        elif (status := _reap().get(child)) is not None:
            return status


def _reap() -> dict[int, int]:
    """Return the wait status of each child that has ended."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def _kill_descendants() -> None:
    deadline = time.monotonic() + MAX_KILL_S
    while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _reap()
        time.sleep(0.01)
