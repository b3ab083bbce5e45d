"""Find and kill every process of an attempt, whatever session or parent it has."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import psutil

COOKIE_VARIABLE = "MESHBOARD_ATTEMPT"  # job/attempt, which all processes of the attempt inherit
RUN_DIR_VARIABLE = "MESHBOARD_RUNS"  # separates host workers that share a machine


class ProcessId(NamedTuple):
    """A PID with its start time. The kernel reuses PIDs, but not with the same start time."""

    pid: int
    started: int  # clock ticks since boot


def get_process_id(pid: int) -> ProcessId | None:
    """Return the identity of a living process, or None for a zombie or a missing process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    # psutil's creation time is relative to a boot time that moves with the clock. The kernel's ticks are not.
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def get_start_id() -> str:
    """Return an identity of the last start of this machine or container, which ended all earlier processes."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    init = get_process_id(1)
    return f"{boot_id}/{init.started if init else 0}"


def read_cookie(process: psutil.Process, run_dir: Path | None = None) -> str | None:
    """Return job/attempt of a process. With `run_dir`, return None for processes of other host workers."""
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return None
    if run_dir is not None and environment.get(RUN_DIR_VARIABLE, str(run_dir)) != str(run_dir):
        return None
    return environment.get(COOKIE_VARIABLE)


def find_processes(job: str, attempt: int, run_dir: Path | None = None) -> list[int]:
    """Return the PIDs that carry the attempt's cookie, and all their descendants.

    A descendant counts even if it cleared its environment. Zombies and the calling process do not count.
    """
    children: dict[int, list[int]] = {}
    pending, found = [], set()
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        children.setdefault(process.info["ppid"], []).append(process.pid)
        if read_cookie(process, run_dir) == f"{job}/{attempt}":
            pending.append(process.pid)
    while pending:
        pid = pending.pop()
        if pid not in found:
            found.add(pid)
            pending += children.get(pid, [])
    return sorted(found - {os.getpid()})


def kill_processes(job: str, attempt: int, timeout_s: float = 5.0, run_dir: Path | None = None) -> list[int]:
    """Send KILL to all processes of an attempt until none is left. Return the PIDs that survive `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        survivors = find_processes(job, attempt, run_dir)
        if not survivors or time.monotonic() > deadline:
            return survivors
        for pid in survivors:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # root owns processes that sudo left
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
