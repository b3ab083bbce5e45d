"""A few child processes kept alive together: each in a session of its own, logged to a file, restarted when it dies."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from webapp.logs import bound
from webapp.up.terminal import say

STOP_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 10.0
PR_SET_PDEATHSIG = 1


class Child(NamedTuple):
    """What to run."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    directory: Path


class Fleet:
    """Runs children until told to stop. Not thread safe: one thread starts, watches and stops."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._children: dict[str, tuple[Child, subprocess.Popen[bytes]]] = {}
        self._deaths: dict[str, int] = {}

    def start(self, child: Child) -> None:
        with self.log(child.name).open("ab") as log:
            process = subprocess.Popen(
                child.argv,
                env=child.environment,
                cwd=child.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only us, and we stop them in order
                preexec_fn=functools.partial(die_with, os.getpid()),  # safe: this process has one thread
            )
        self._children[child.name] = (child, process)

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Restart what dies, a little later each time in a row, and keep the logs short, until interrupted."""
        due: dict[str, float] = {}
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            for name, (child, process) in list(self._children.items()):
                bound(self.log(name))
                if process.poll() is None:
                    continue
                if name not in due:
                    # Its own children, a scheduler of its own say, must not go on beside the next one's.
                    end_writers(self.log(name))
                    self._deaths[name] = self._deaths.get(name, 0) + 1
                    pause = min(LONGEST_PAUSE_S, 0.5 * 2 ** min(self._deaths[name] - 1, 6))
                    due[name] = now + pause
                    say(f"The process {name} ended with exit code {process.returncode}. It restarts in {pause:.1f} s.")
                elif now >= due[name]:
                    del due[name]
                    self.start(child)
                    on_restart()

    def stop(self, names: list[str]) -> None:
        """TERM, wait, KILL: the children named, all at once, and whatever they started."""
        processes = {name: self._children.pop(name)[1] for name in names if name in self._children}
        for process in processes.values():
            _signal_session(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for name, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_session(process, signal.SIGKILL)
            process.wait()
            end_writers(self.log(name))

    def end_leftovers(self, names: list[str], grace_s: float = STOP_TIMEOUT_S) -> dict[str, list[int]]:
        """End what a runner that was killed has left of these services. Returns the pids found, by service."""
        found = {name: end_writers(self.log(name), grace_s) for name in names}
        return {name: pids for name, pids in found.items() if pids}

    def alive(self, name: str) -> bool:
        return name in self._children and self._children[name][1].poll() is None

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._children.items()}

    def log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def log_tail(self, name: str, lines: int = 15) -> str:
        text = self.log(name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def writers_of(log: Path) -> list[int]:
    """Pids whose standard output is `log`.

    Unlike a session, a parent or a pid on record, this finds a dead service's children and never a stranger who was
    given its pid. A job's supervisor, which has to outlive its host worker, writes to a log of its own.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        wanted = log.stat()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
                if os.path.samestat((entry / "fd" / "1").stat(), wanted):
                    found.append(int(entry.name))
    return found


def end_writers(log: Path, grace_s: float = 0.0) -> list[int]:
    """End every process that writes to `log`: TERM if it is given grace, then KILL. Returns the pids it found."""
    found = writers_of(log)
    left = found
    if grace_s:
        _signal_all(left, signal.SIGTERM)
        left = _wait_for_none(log, grace_s)
    while left:
        _signal_all(left, signal.SIGKILL)
        left = _wait_for_none(log, 0.1)
    return found


def _wait_for_none(log: Path, timeout_s: float) -> list[int]:
    """The writers of `log` that are left after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := writers_of(log)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def die_with(parent: int) -> None:
    # A runner killed outright must not leave services behind that hold its port and its database.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
