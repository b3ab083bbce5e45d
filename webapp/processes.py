"""A few child processes kept alive together: each in a session of its own, logged to a file, restarted when it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STOP_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 10.0
LOG_BYTES = 5_000_000
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
        log_path = self._log_dir / f"{child.name}.log"
        if log_path.exists() and log_path.stat().st_size > LOG_BYTES:
            log_path.replace(log_path.with_suffix(".log.1"))
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                child.argv,
                env=child.environment,
                cwd=child.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only us, and we stop them in order
                preexec_fn=_die_with_parent,  # safe: this process has one thread
            )
        self._children[child.name] = (child, process)

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Restart what dies, a little later each time in a row, until interrupted."""
        due: dict[str, float] = {}
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            for name, (child, process) in list(self._children.items()):
                if process.poll() is None:
                    continue
                if name not in due:
                    self._deaths[name] = self._deaths.get(name, 0) + 1
                    pause = min(LONGEST_PAUSE_S, 0.5 * 2 ** min(self._deaths[name] - 1, 6))
                    due[name] = now + pause
                    print(f"{name} ended with {process.returncode}; starting it again in {pause:.1f} s", flush=True)
                elif now >= due[name]:
                    del due[name]
                    self.start(child)
                    on_restart()

    def stop(self, names: list[str]) -> None:
        """TERM, wait, KILL: the children named, all at once."""
        processes = [self._children.pop(name)[1] for name in names if name in self._children]
        for process in processes:
            _signal_session(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_session(process, signal.SIGKILL)
            process.wait()

    def alive(self, name: str) -> bool:
        return name in self._children and self._children[name][1].poll() is None

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._children.items()}

    def log_tail(self, name: str, lines: int = 15) -> str:
        text = (self._log_dir / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _die_with_parent() -> None:
    # A runner killed outright must not leave services behind that hold its port and its database.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
