"""Start processes, Redis servers, and small disks for tests, wait for them, and clean them up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from webapp.redis_server import build_redis_command
from webapp.runner import find_free_port

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT_FACTOR = "6"
PAGE_BYTES = 4096
T = TypeVar("T")


def scale_timeout(seconds: float) -> float:
    """Return a timeout scaled by MESHBOARD_PATIENCE for busy machines.

    `make slow`, `make faults` and `make cluster` set the factor to 1, because they check deadlines in seconds.
    """
    return seconds * float(os.environ.get("MESHBOARD_PATIENCE", DEFAULT_TIMEOUT_FACTOR))


def wait_until(condition: Callable[[], T], expected: str, timeout_s: float = 60.0, pause_s: float = 0.05) -> T:
    """Return the first true value of `condition`, or fail with `expected` after the scaled timeout."""
    limit_s = scale_timeout(timeout_s)
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s in vain until {expected}; last saw {value!r}"
        time.sleep(pause_s)


def is_gone(pid: int) -> bool:
    """Return True if no process has this PID, or if only a zombie does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def list_session_pids(leader: int) -> list[int]:
    """Return the PIDs of a session without zombies."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader and not is_gone(int(entry.name)):
                pids.append(int(entry.name))
    return pids


@contextlib.contextmanager
def run_process(
    argv: list[str], environment: dict[str, str], log: Path, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a new session, and end the whole session on exit."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            argv, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(scale_timeout(15))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def base_environment() -> dict[str, str]:
    """Return the environment of a child process without Meshboard settings. Tests without a sandbox can run as root."""
    names = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    passed = {name: os.environ[name] for name in names if name in os.environ}
    return {**passed, "PYTHONUNBUFFERED": "1", "MESHBOARD_ALLOW_ROOT_JOBS": "1"}


class RedisServer:
    """A private Redis that can be killed and restarted with the same port and data."""

    def __init__(self, folder: Path, *addresses: str) -> None:
        """Prepare a server that listens on loopback and on `addresses`."""
        self._folder, self._addresses = folder, addresses
        self._port, self._password = find_free_port(), "test-password"
        self.url = self.get_url("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None

    def get_url(self, address: str, *, password: bool = True) -> str:
        credentials = f":{self._password}@" if password else ""
        return f"redis://{credentials}{address}:{self._port}/0"

    def start(self) -> None:
        argv = build_redis_command(self._folder, self._port, self._password)
        if self._addresses:
            argv += ["--bind", " ".join(("127.0.0.1", *self._addresses))]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = self.client()

        def answers() -> bool:
            with contextlib.suppress(redis.RedisError):
                return bool(client.ping())
            return False

        wait_until(answers, "Redis answers", 20)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the process. Redis then accepts connections but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=scale_timeout(5))


@contextlib.contextmanager
def run_redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


@contextlib.contextmanager
def mount_small_disk(disk: Path, size: str = "1m") -> Iterator[Path]:
    """Mount a small file system at `disk`, or skip the test if mounts are not allowed."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no filesystem may be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@contextlib.contextmanager
def mount_full_disk(disk: Path) -> Iterator[Path]:
    """Mount a small file system without free space at `disk`."""
    with mount_small_disk(disk):
        fill_disk(disk)
        yield disk


def fill_disk(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
        while True:
            filling.write(b"\0" * PAGE_BYTES)
    assert os.statvfs(disk).f_bavail == 0
