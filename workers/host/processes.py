"""Finding and ending every process of an attempt, however it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

COOKIE = "MESHBOARD_ATTEMPT"


def cookie(job: str, attempt: int) -> str:
    """The environment entry that every process of an attempt inherits, whatever session it moves to."""
    return f"{COOKIE}={job}/{attempt}"


def processes_of(job: str, attempt: int) -> list[int]:
    """Pids that carry the attempt's cookie; zombies have no environment left and do not count."""
    wanted = cookie(job, attempt).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def sweep(job: str, attempt: int, timeout_s: float = 5.0) -> list[int]:
    """KILL everything of an attempt until nothing is left. Returns what survived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = processes_of(job, attempt)
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
