"""Run web, controller, recorder, and a host worker as processes of any checkout on one Redis."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, RedisServer, base_environment, run_process, wait_until
from webapp.runner import find_free_port, is_free

SECRET_KEY = "only-for-this-test-0123456789-0123456789-0123456789-0123"


class BoardServices:
    """The services of a board, each of which can be stopped alone."""

    def __init__(self, folder: Path, redis: RedisServer, database_url: str = "", root: Path = ROOT) -> None:
        """Use the code of `root`. Without a URL, the database is a file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.redis, self.root = folder, redis, root
        self.database_url = database_url or f"sqlite:///{folder}/board.sqlite3"
        self.port = find_free_port()
        self.token = ""

    def replace(self, folder: Path, database_url: str = "") -> BoardServices:
        """Return another board with the same address."""
        made = BoardServices(folder, self.redis, database_url, self.root)
        made.port, made.token = self.port, self.token
        return made

    @property
    def environment(self) -> dict[str, str]:
        return {
            **base_environment(),
            "PYTHONPATH": str(self.root),
            "MESHBOARD_SECRET_KEY": SECRET_KEY,
            "MESHBOARD_REDIS_URL": self.redis.url,
            "MESHBOARD_STATE_DIR": str(self.folder),
            "MESHBOARD_DATABASE_URL": self.database_url,
            "MESHBOARD_HTTPS": "0",
        }

    def manage(self, *arguments: str) -> str:
        argv = [sys.executable, "manage.py", *arguments]
        done = subprocess.run(
            argv, env=self.environment, cwd=self.root, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def prepare(self) -> None:
        """Migrate the database, and create a user with all permissions."""
        self.manage("migrate", "--verbosity", "0")
        self.token = json.loads(self.manage("meshboard_user"))["api_token"]

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run web, controller, and recorder."""
        serve = [sys.executable, "-m", "webapp.serve", "--port", str(self.port)]
        with contextlib.ExitStack() as stack:
            web = stack.enter_context(self._run_service("web", serve))
            for name in ("controller", "recorder"):
                stack.enter_context(self._run_service(name, [sys.executable, "manage.py", name]))
            wait_until(lambda: not is_free(self.port) or web.poll() is not None, "the web listens", 90)
            assert web.poll() is None, (self.folder / "web.log").read_text()
            yield

    @contextlib.contextmanager
    def run_host(self, name: str, state: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a host worker that joins. Its folder `state` is kept."""
        state.mkdir(parents=True, exist_ok=True)
        keep = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONPATH")
        environment = {key: value for key, value in self.environment.items() if key in keep} | {
            "MESHBOARD_STATE_DIR": str(state),
            "MESHBOARD_RUN_DIR": str(state / "runs"),
            "MESHBOARD_HOST_NAME": name,
            "MESHBOARD_SLOTS": "4",
            "MESHBOARD_DEVICE": "cpu",
            "MESHBOARD_JOIN_TOKEN": self.manage("join_token").strip(),
        }
        argv = [sys.executable, "-m", "workers.host.join", f"http://127.0.0.1:{self.port}"]
        with run_process(argv, environment, self.folder / f"{name}.log", self.root) as process:
            wait_until(lambda: name in [h["name"] for h in self.call("GET", "hosts")], f"{name} has joined", 90)
            yield process

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Token {self.token}", "Content-Type": "application/json"}
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        with urllib.request.urlopen(
            urllib.request.Request(address, data=data, headers=headers, method=method), timeout=30
        ) as answer:
            return json.load(answer)

    def get_status(self, job: str) -> str:
        return str(self.call("GET", f"jobs/{job}")["status"])

    def _run_service(self, name: str, argv: list[str]) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return run_process(argv, self.environment, self.folder / f"{name}.log", self.root)


OLDER_COMMIT = (
    "06665c78028997b355728c05e93c5422b8f50154"  # the first commit with the initial migration of version 0.2.0
)


def export_older_version(folder: Path) -> Path:
    """Export all files to the folder."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", OLDER_COMMIT], capture_output=True, check=False).returncode:
        pytest.skip(f"this checkout's history does not reach back to {OLDER_COMMIT[:7]}")
    packed = subprocess.run([*git, "archive", OLDER_COMMIT], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder
