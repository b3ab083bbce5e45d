"""Run all of Meshboard in a private state directory, as `make up` does."""

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

import psutil
import redis

from tests.support.job_waits import describe_job, record_ending, wait_for_status
from tests.support.processes import ROOT, base_environment, is_gone, scale_timeout, wait_until
from webapp.runner import find_free_port
from workers.host.processes import find_processes


class Board:
    """A running installation with its address, credentials, and REST API."""

    def __init__(self, state: Path, process: subprocess.Popen[bytes]) -> None:
        self.state, self.process = state, process

    @property
    def info(self) -> dict[str, Any]:
        """Content of up.json."""
        info: dict[str, Any] = json.loads((self.state / "up.json").read_text())
        return info

    @property
    def url(self) -> str:
        return str(self.info["url"])

    @property
    def login(self) -> tuple[str, str]:
        """User name and password."""
        return self.info["username"], self.info["password"]

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """Call REST with the token of up.json, and raise urllib's HTTPError for an error status."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Token {self.info['api_token']}", "Content-Type": "application/json"}
        headers |= {} if key is None else {"Idempotency-Key": key}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=scale_timeout(20)) as response:
            return json.load(response)

    def manage(self, *command: str) -> Any:
        """Run a command of manage.py with the settings of the web process, and return its JSON output."""
        environment = psutil.Process(self.info["pids"]["web"]).environ()
        argv = [sys.executable, "manage.py", *command]
        return json.loads(subprocess.run(argv, cwd=ROOT, env=environment, check=True, capture_output=True).stdout)

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.call("POST", "jobs", spec)["id"])

    def get_job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.call("GET", f"jobs/{job_id}")
        return job

    def wait_for_status(self, job_id: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one of these statuses, and fail at once if the job ends with another one."""
        job = wait_for_status(lambda: self._try_get_job(job_id), job_id, statuses, timeout_s)
        if job["finished"]:
            num_processes = len(self.list_processes(job_id, job["attempt"]))
            record_ending(job["status"], job["history"][-1]["reason"], num_processes)
        return job

    def _try_get_job(self, job_id: str) -> dict[str, Any] | None:
        with contextlib.suppress(urllib.error.URLError, TimeoutError):
            return self.get_job(job_id)
        return None

    def wait_for_line(self, job_id: str, start: str, attempt: int = 1) -> None:
        """Wait for a log line of rank 0 with this start, and fail at once if the job ends without it."""
        logs = self.state / "runs" / job_id / str(attempt) / "logs"
        expected = f"{job_id} logs {start!r}"

        def has_line() -> bool:
            job = self._try_get_job(job_id)  # before the logs, because a job ends after its last line
            texts = [file.read_text() for file in logs.rglob("attempt_*/0/stdout.log")]
            if any(line.startswith(start) for text in texts for line in text.splitlines()):
                return True
            assert job is None or not job["finished"], f"waited until {expected}, but {describe_job(job)}"
            return False

        wait_until(has_line, expected)

    def list_processes(self, job_id: str, attempt: int = 1) -> list[int]:
        return find_processes(job_id, attempt)

    def connect_redis(self) -> redis.Redis:
        password, port = ((self.state / name).read_text().strip() for name in ("redis_password", "redis_port"))
        return redis.Redis(host="127.0.0.1", port=int(port), password=password)

    def read_log(self, name: str) -> str:
        return (self.state / "log" / f"{name}.log").read_text(errors="replace")


@contextlib.contextmanager
def run_board(state: Path, slots: int = 4, **settings: str) -> Iterator[Board]:
    """Run Meshboard until exit, then press Ctrl-C and check that no process remains."""
    state.mkdir(parents=True, exist_ok=True)
    output = state / "runner.log"
    with output.open("wb") as log:
        process = start_runner(state, log, MESHBOARD_SLOTS=str(slots), **settings)
    board = Board(state, process)
    services: dict[str, int] = {}
    try:
        wait_until(lambda: process.poll() is not None or b"Ctrl-C" in output.read_bytes(), "Meshboard is up", 180)
        assert process.poll() is None, output.read_text()
        wait_until(lambda: board.call("GET", "hosts"), "the host announces itself")
        yield board
        services = board.info["pids"]
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        try:
            process.wait(scale_timeout(60))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [name for name, pid in services.items() if not is_gone(pid)] == [], "Ctrl-C leaves no process"


def start_runner(state: Path, output: IO[bytes] | int, **settings: str) -> subprocess.Popen[bytes]:
    """Start the one-command runner on a free port."""
    port = str(find_free_port())
    paths = {"MESHBOARD_STATE_DIR": str(state), "MESHBOARD_PORT": port, "MESHBOARD_HOST_NAME": "here"}
    return subprocess.Popen(
        [sys.executable, "-m", "webapp.runner"],
        env={**base_environment(), **paths, **settings},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
