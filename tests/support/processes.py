"""Real services for tests: started on free ports, waited for by condition, always reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import redis

from tests.support.patience import patient
from webapp.redis_server import build_redis_command
from webapp.runner import find_free_port

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = 60.0, pause_s: float = 0.05) -> T:
    """The first true value of `condition`; an AssertionError that says `what` after `timeout_s` times our patience."""
    limit_s = patient(timeout_s)
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s in vain until {what}; last saw {value!r}"
        time.sleep(pause_s)


def gone(pid: int) -> bool:
    """True when there is no such process, or only its zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def session(leader: int) -> list[int]:
    """Pids of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader and not gone(int(entry.name)):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def running(
    argv: list[str], environment: dict[str, str], log: Path, cwd: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, ended with its whole session."""
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
            process.wait(patient(15))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class RedisServer:
    """A private Redis that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path, *addresses: str) -> None:
        """`addresses` where it listens, beside loopback."""
        self._folder, self._addresses = folder, addresses
        self._port, self._password = find_free_port(), "test-password"
        self.url = self.url_at("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None

    def url_at(self, address: str, *, password: bool = True) -> str:
        who = f":{self._password}@" if password else ""
        return f"redis://{who}{address}:{self._port}/0"

    def start(self) -> None:
        argv = build_redis_command(self._folder, self._port, self._password)
        if self._addresses:
            argv += ["--bind", " ".join(("127.0.0.1", *self._addresses))]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = self.client()
        wait_until(lambda: _answers(client), "Redis answers", 20)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Its process stands still: connections are taken, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=patient(5))


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


def base_environment() -> dict[str, str]:
    """What a child needs of ours, with no Meshboard setting."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
    return {**{k: os.environ[k] for k in kept if k in os.environ}, "PYTHONUNBUFFERED": "1"}
