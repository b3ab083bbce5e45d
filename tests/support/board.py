"""The whole of Meshboard as `make up` starts it, on a state directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import redis

from tests.support.patience import patient
from tests.support.processes import ROOT, base_environment, gone, wait_until
from tests.support.told import ended
from webapp.runner import find_free_port
from workers.host.processes import find_processes


class Board:
    """A running installation: its address, its credentials, and its REST API."""

    def __init__(self, state: Path, process: subprocess.Popen[bytes]) -> None:
        self.state, self.process = state, process

    @property
    def up(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / "up.json").read_text())
        return found

    @property
    def url(self) -> str:
        return str(self.up["url"])

    @property
    def login(self) -> tuple[str, str]:
        """Name and password."""
        return self.up["username"], self.up["password"]

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """REST with the token of up.json; raises urllib's HTTPError on a refusal."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Token {self.up['api_token']}", "Content-Type": "application/json"}
        headers |= {} if key is None else {"Idempotency-Key": key}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=patient(20)) as answer:
            return json.load(answer)

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.call("POST", "jobs", spec)["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"jobs/{job_id}")
        return found

    def wait_for(self, job_id: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        what = f"{job_id} is {' or '.join(statuses)}"

        def reached() -> dict[str, Any] | None:
            with contextlib.suppress(urllib.error.URLError, TimeoutError):
                job = self.job(job_id)
                return job if job["status"] in statuses else None
            return None

        found = wait_until(reached, what, timeout_s, 0.2)
        assert found is not None
        if found["finished"]:
            ended(found["status"], found["history"][-1]["reason"], len(self.processes(job_id, found["attempt"])))
        return found

    def wait_for_line(self, job_id: str, start: str, attempt: int = 1) -> None:
        """Until rank 0's log has a line that starts so."""
        logs = self.state / "runs" / job_id / str(attempt) / "logs"

        def seen() -> bool:
            texts = [f.read_text() for f in logs.rglob("attempt_*/0/stdout.log")]
            return any(line.startswith(start) for text in texts for line in text.splitlines())

        wait_until(seen, f"{job_id} logs {start!r}")

    def processes(self, job_id: str, attempt: int = 1) -> list[int]:
        return find_processes(job_id, attempt)

    def redis(self) -> redis.Redis:
        """Its embedded Redis."""
        password, port = ((self.state / name).read_text().strip() for name in ("redis_password", "redis_port"))
        return redis.Redis(host="127.0.0.1", port=int(port), password=password)

    def log(self, name: str) -> str:
        return (self.state / "log" / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def board(state: Path, slots: int = 4, **settings: str) -> Iterator[Board]:
    """Start, wait for the login line, and at the end Ctrl-C: nothing may be left."""
    state.mkdir(parents=True, exist_ok=True)
    output = state / "runner.log"
    with output.open("wb") as log:
        process = start(state, log, MESHBOARD_SLOTS=str(slots), **settings)
    made = Board(state, process)
    services: dict[str, int] = {}
    try:
        wait_until(lambda: process.poll() is not None or b"Ctrl-C" in output.read_bytes(), "Meshboard is up", 180)
        assert process.poll() is None, output.read_text()
        wait_until(lambda: made.call("GET", "hosts"), "the host announces itself")
        yield made
        services = made.up["pids"]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        try:
            process.wait(patient(60))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [name for name, pid in services.items() if not gone(pid)] == [], "Ctrl-C leaves no process"


def start(state: Path, output: IO[bytes] | int, **settings: str) -> subprocess.Popen[bytes]:
    """The one command, on a free port."""
    port = str(find_free_port())
    ours = {"MESHBOARD_STATE_DIR": str(state), "MESHBOARD_PORT": port, "MESHBOARD_HOST_NAME": "here"}
    return subprocess.Popen(
        [sys.executable, "-m", "webapp.runner"],
        env={**base_environment(), **ours, **settings},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
