"""Child processes of `make up`: each has its own session and log, and restarts after it ends."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jobs.core.child_processes import exit_with_parent
from webapp.logs import truncate_log


def print_line(words: str) -> None:
    """Print a line. After the terminal is closed, all output is dropped."""
    try:
        print(words, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


STOP_TIMEOUT_S = 10.0
MAX_RESTART_DELAY_S = 10.0


class Service(NamedTuple):
    """Command of a service."""

    name: str
    argv: list[str]
    environment: dict[str, str]
    directory: Path


class ProcessManager:
    """Starts, restarts, and stops services. Not thread-safe."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._children: dict[str, tuple[Service, subprocess.Popen[bytes]]] = {}
        self._deaths: dict[str, int] = {}

    def start(self, child: Service) -> None:
        with self.get_log(child.name).open("ab") as log:
            process = subprocess.Popen(
                child.argv,
                env=child.environment,
                cwd=child.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C does not reach the service, which stops in order
                preexec_fn=functools.partial(exit_with_parent, os.getpid()),  # safe: this process has one thread
            )
        self._children[child.name] = (child, process)

    def watch(self, on_restart: Callable[[], None]) -> None:
        """Restart services that end, with growing delays, and truncate logs. Runs until an interrupt."""
        due: dict[str, float] = {}
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            for name, (child, process) in list(self._children.items()):
                truncate_log(self.get_log(name))
                if process.poll() is None:
                    continue
                if name not in due:
                    # Children of the old process must not run next to children of the new one.
                    stop_writers(self.get_log(name))
                    self._deaths[name] = self._deaths.get(name, 0) + 1
                    pause = min(MAX_RESTART_DELAY_S, 0.5 * 2 ** min(self._deaths[name] - 1, 6))
                    due[name] = now + pause
                    print_line(
                        f"The process {name} ended with exit code {process.returncode}. It restarts in {pause:.1f} s."
                    )
                elif now >= due[name]:
                    del due[name]
                    self.start(child)
                    on_restart()

    def stop(self, names: list[str]) -> None:
        """Stop services and their children: TERM, wait, KILL."""
        processes = {name: self._children.pop(name)[1] for name in names if name in self._children}
        for process in processes.values():
            _signal_session(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for name, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_session(process, signal.SIGKILL)
            process.wait()
            stop_writers(self.get_log(name))

    def stop_leftovers(self, names: list[str], grace_s: float = STOP_TIMEOUT_S) -> dict[str, list[int]]:
        """Stop processes of these services that a killed runner left. Return their PIDs by service."""
        found = {name: stop_writers(self.get_log(name), grace_s) for name in names}
        return {name: pids for name, pids in found.items() if pids}

    def is_alive(self, name: str) -> bool:
        return name in self._children and self._children[name][1].poll() is None

    def get_pids(self) -> dict[str, int]:
        return {name: process.pid for name, (_, process) in self._children.items()}

    def get_log(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    def read_log_tail(self, name: str, lines: int = 15) -> str:
        text = self.get_log(name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def find_writers(log: Path) -> list[int]:
    """Return the PIDs of processes whose standard output is `log`.

    This also finds children of a dead service, and never a process that got a recycled PID. The supervisor of a job
    continues after its host worker ends, so it has another log.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        wanted = log.stat()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # the process ended, or belongs to another user
                if os.path.samestat((entry / "fd" / "1").stat(), wanted):
                    found.append(int(entry.name))
    return found


def stop_writers(log: Path, grace_s: float = 0.0) -> list[int]:
    """Stop every process that writes to `log`, and return the PIDs. Without grace, KILL only."""
    found = find_writers(log)
    left = found
    if grace_s:
        _signal_all(left, signal.SIGTERM)
        left = _wait_for_none(log, grace_s)
    while left:
        _signal_all(left, signal.SIGKILL)
        left = _wait_for_none(log, 0.1)
    return found


def _wait_for_none(log: Path, timeout_s: float) -> list[int]:
    """Return the writers of `log` that remain after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := find_writers(log)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
