"""Finding and ending every process of an attempt, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil

COOKIE = "MESHBOARD_ATTEMPT"
RUNS = "MESHBOARD_RUNS"  # the run directory of the host worker: a machine may have several, and a gang two of them


class ProcessId(NamedTuple):
    """A process for certain: pids are used again, a pid with its start time is not."""

    pid: int
    started: int  # clock ticks since boot


def process_id(pid: int) -> ProcessId | None:
    """Identity of a living process, None when there is none (a zombie is none).

    psutil's creation time is relative to a boot time that moves with the clock; the kernel's ticks do not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def cookie_of(process: psutil.Process, runs: Path | None = None) -> str | None:
    """job/attempt of the attempt that a process belongs to; every process of one inherits it, whatever session it
    moves to. Of one that another host worker started than that of `runs`, None."""
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return None
    if runs is not None and environment.get(RUNS, str(runs)) != str(runs):
        return None
    return environment.get(COOKIE)


def processes_of(job: str, attempt: int, runs: Path | None = None) -> list[int]:
    """Pids that carry the attempt's cookie, and all below them: one that emptied its environment too. Ourselves and
    zombies do not count. With `runs` those of one host worker alone."""
    below: dict[int, list[int]] = {}
    wanted, found = [], set()
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        below.setdefault(process.info["ppid"], []).append(process.pid)
        if cookie_of(process, runs) == f"{job}/{attempt}":
            wanted.append(process.pid)
    while wanted:
        pid = wanted.pop()
        if pid not in found:
            found.add(pid)
            wanted += below.get(pid, [])
    return sorted(found - {os.getpid()})


def sweep(job: str, attempt: int, timeout_s: float = 5.0, runs: Path | None = None) -> list[int]:
    """KILL everything of an attempt until nothing is left. Returns what survived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = processes_of(job, attempt, runs)
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # root's own, such as what sudo left behind
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
