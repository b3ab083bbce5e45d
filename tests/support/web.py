"""The web server as it is deployed, over a database and a Redis of the test's own."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.patience import patient
from tests.support.processes import ROOT, RedisServer, base_environment, running, wait_until
from webapp.runner import find_free_port, is_free

# One start of Django for all of it: migrated, and four people with a token and a session each.
PEOPLE = """
import json, django
django.setup()
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client
from knox.models import AuthToken
call_command("migrate", verbosity=0)
told = {}
for name in ("owner", "stranger", "viewer", "staff"):
    user = User(username=name, is_staff=name in ("viewer", "staff"))
    user.password = PBKDF2PasswordHasher().encode(name + "-password", "salt", iterations=1)  # a second each as it is
    user.save()
    staffs = ["view_job", "view_host", "change_job", "change_host", "add_project"]
    wanted = {"viewer": ["view_job", "view_host"], "staff": staffs}
    user.user_permissions.set(Permission.objects.filter(codename__in=wanted.get(name, [])))
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    told[name] = {"token": AuthToken.objects.create(user)[1], "session": client.cookies["sessionid"].value}
print(json.dumps(told))
"""
SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "webapp.settings",
    "MESHBOARD_SECRET_KEY": "only-for-this-test-0123456789-0123456789-0123456789-0123",
}
NO_REDIS = {"MESHBOARD_REDIS_URL": "redis://127.0.0.1:1"}  # there is nothing to tell yet


class Answer(NamedTuple):
    """Of an HTTP request."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """A running web server and who may log in to it."""

    def __init__(
        self,
        port: int,
        people: dict[str, dict[str, str]],
        process: subprocess.Popen[bytes],
        log: Path,
        redis: RedisServer,
        database_url: str,
        environment: dict[str, str],
    ) -> None:
        self.port, self.people, self.process, self._log = port, people, process, log
        self.redis, self.database_url, self.environment = redis, database_url, environment

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def memory_bytes(self) -> int:
        """Resident, now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def token(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Token {self.people[name]['token']}"}

    def cookie(self, name: str) -> dict[str, str]:
        return {"Cookie": f"sessionid={self.people[name]['session']}"}

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30,
    ) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        own = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, headers=own, method=method)
        try:
            with urllib.request.urlopen(request, timeout=patient(timeout_s)) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def submit(self, spec: object, who: str = "owner") -> str:
        """The job's id."""
        answer = self.call("POST", "/api/v1/jobs", spec, headers=self.token(who))
        assert answer.status == 201, answer.body
        return str(answer.json()["id"])

    def raw(self, sent: bytes, timeout_s: float = 30) -> bytes:
        """What comes back for these very bytes, until the server closes."""
        got = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=patient(timeout_s)) as line:
            line.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                while part := line.recv(65536):
                    got += part
        return got


def _filled(database_url: str) -> dict[str, dict[str, str]]:
    """Migrate the database and make the people, whose tokens and sessions it tells. One SQLite is as another, so that
    a process fills one and copies it."""
    scheme, _, path = database_url.partition(":///")
    if scheme != "sqlite":
        return _made(database_url)
    template, people = _template()
    Path(path).write_bytes(template)
    return people


@functools.cache
def _template() -> tuple[bytes, dict[str, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        people = _made(f"sqlite:///{folder}/db.sqlite3")
        return Path(folder, "db.sqlite3").read_bytes(), people


def _made(database_url: str) -> dict[str, dict[str, str]]:
    made = subprocess.run(
        [sys.executable, "-c", PEOPLE],
        env={**base_environment(), **SETTINGS, **NO_REDIS, "MESHBOARD_DATABASE_URL": database_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    people: dict[str, dict[str, str]] = json.loads(made.stdout.splitlines()[-1])
    return people


@contextlib.contextmanager
def site(
    database_url: str, redis: RedisServer, folder: Path, *, listen: str = "127.0.0.1", **settings: str
) -> Iterator[Site]:
    """Migrate, make the people, serve."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **base_environment(),
        **SETTINGS,
        "MESHBOARD_REDIS_URL": redis.url,
        "MESHBOARD_STATE_DIR": str(folder),
        "MESHBOARD_DATABASE_URL": database_url,
        "MESHBOARD_HTTPS": "0",
        "MESHBOARD_SUBMITS_PER_MINUTE": "1000000",
        "MESHBOARD_REQUESTS_PER_MINUTE": "1000000",
        **settings,
    }
    people = _filled(database_url)
    port, log = find_free_port(), folder / "web.log"
    serve = [sys.executable, "-m", "webapp.serve", "--host", listen, "--port", str(port)]
    with running(serve, environment, log, ROOT) as process:
        wait_until(lambda: not is_free(port) or process.poll() is not None, "the web server listens")
        assert process.poll() is None, log.read_text()
        yield Site(port, people, process, log, redis, database_url, environment)
