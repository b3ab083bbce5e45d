"""Web, controller, recorder and a host worker, each a process of its own and each of any checkout, on one Redis."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, RedisServer, base_environment, run_process, wait_until
from webapp.runner import find_free_port, is_free

SECRET_KEY = "only-for-this-test-0123456789-0123456789-0123456789-0123"


class Services:
    """A board by its parts: what one is stopped for goes on in the others."""

    def __init__(self, folder: Path, redis: RedisServer, database_url: str = "", root: Path = ROOT) -> None:
        """`root` is the checkout whose code runs; without a URL the database is a file in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.redis, self.root = folder, redis, root
        self.database_url = database_url or f"sqlite:///{folder}/board.sqlite3"
        self.port = find_free_port()
        self.token = ""

    def of(self, folder: Path, database_url: str = "") -> Services:
        """Another board in place of this one: hosts find it at the same address."""
        made = Services(folder, self.redis, database_url, self.root)
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
        """Migrate, and make somebody who may do all."""
        self.manage("migrate", "--verbosity", "0")
        self.token = json.loads(self.manage("meshboard_user"))["api_token"]

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Web, controller and recorder."""
        serve = [sys.executable, "-m", "webapp.serve", "--port", str(self.port)]
        with contextlib.ExitStack() as stack:
            web = stack.enter_context(self._running("web", serve))
            for name in ("controller", "recorder"):
                stack.enter_context(self._running(name, [sys.executable, "manage.py", name]))
            wait_until(lambda: not is_free(self.port) or web.poll() is not None, "the web listens", 90)
            assert web.poll() is None, (self.folder / "web.log").read_text()
            yield

    @contextlib.contextmanager
    def host(self, name: str, state: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A host worker that joins; `state` is its own, and outlives it."""
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

    def status(self, job: str) -> str:
        return str(self.call("GET", f"jobs/{job}")["status"])

    def _running(self, name: str, argv: list[str]) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return run_process(argv, self.environment, self.folder / f"{name}.log", self.root)
