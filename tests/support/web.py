"""Run the web server of a deployment with a private database and Redis, over HTTP or over TLS with a private CA."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.job_waits import wait_for_status
from tests.support.processes import ROOT, RedisServer, base_environment, run_process, scale_timeout, wait_until
from webapp.runner import find_free_port, is_free

# Migrate the database and create four users, each with a token and a session, in one start of Django.
CREATE_USERS = """
import json, django
django.setup()
from django.conf import settings
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client
from knox.models import AuthToken
call_command("migrate", verbosity=0)
users = {}
for name in ("owner", "stranger", "viewer", "staff"):
    user = User(username=name, is_staff=name in ("viewer", "staff"))
    user.password = PBKDF2PasswordHasher().encode(name + "-password", "salt", iterations=1)  # the default takes 1 s
    user.save()
    permissions = {
        "viewer": ["view_job", "view_host"],
        "staff": ["view_job", "view_host", "change_job", "change_host", "add_project"],
    }
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions.get(name, [])))
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    session = client.cookies[settings.SESSION_COOKIE_NAME].value
    users[name] = {"token": AuthToken.objects.create(user)[1], "session": session}
print(json.dumps(users))
"""
SERVE_TLS = """
import sys, uvicorn
from webapp.serve import build_config
config = build_config("127.0.0.1", int(sys.argv[1]))
config.ssl_certfile, config.ssl_keyfile = sys.argv[2], sys.argv[3]
uvicorn.Server(config).run()
"""
SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "webapp.settings",
    "MESHBOARD_SECRET_KEY": "only-for-this-test-0123456789-0123456789-0123456789-0123",
}
NO_REDIS = {"MESHBOARD_REDIS_URL": "redis://127.0.0.1:1"}
OPENSSL = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]


class Response(NamedTuple):
    """Response to an HTTP request, with any status."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def _send(request: urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None = None) -> Response:
    try:
        with urllib.request.urlopen(request, timeout=scale_timeout(timeout_s), context=context) as response:
            return Response(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        return Response(error.code, error.headers, error.read())


class Site:
    """A running web server and the users who can log in."""

    def __init__(
        self,
        port: int,
        users: dict[str, dict[str, str]],
        process: subprocess.Popen[bytes],
        log: Path,
        redis: RedisServer,
        database_url: str,
        environment: dict[str, str],
    ) -> None:
        self.port, self.users, self.process, self._log = port, users, process, log
        self.redis, self.database_url, self.environment = redis, database_url, environment
        self.url = f"http://127.0.0.1:{port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the server process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def build_token_header(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Token {self.users[name]['token']}"}

    def build_cookie_header(self, name: str) -> dict[str, str]:
        return {"Cookie": f"sessionid={self.users[name]['session']}"}

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30,
    ) -> Response:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        return _send(urllib.request.Request(self.url + path, data=data, headers=headers, method=method), timeout_s)

    def submit_job(self, spec: object, user: str = "owner") -> str:
        """Submit a job, and return its ID."""
        response = self.call("POST", "/api/v1/jobs", spec, headers=self.build_token_header(user))
        assert response.status == 201, response.body
        return str(response.json()["id"])

    def send_raw(self, content: bytes, timeout_s: float = 30) -> bytes:
        """Send these bytes, and return all bytes until the server closes the connection."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=scale_timeout(timeout_s)) as connection:
            connection.sendall(content)
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(65536):
                    received += chunk
        return received


@contextlib.contextmanager
def run_site(
    database_url: str, redis: RedisServer, folder: Path, *, listen: str = "127.0.0.1", **settings: str
) -> Iterator[Site]:
    """Migrate the database, create the users, and run the web server."""
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
    users = _fill_database(database_url)
    port, log = find_free_port(), folder / "web.log"
    argv = [sys.executable, "-m", "webapp.serve", "--host", listen, "--port", str(port)]
    with run_process(argv, environment, log, ROOT) as process:
        wait_until(lambda: not is_free(port) or process.poll() is not None, "the web server listens")
        assert process.poll() is None, log.read_text()
        yield Site(port, users, process, log, redis, database_url, environment)


def _fill_database(database_url: str) -> dict[str, dict[str, str]]:
    """Migrate a database and create the users. For SQLite, copy a template, which takes no start of Django."""
    scheme, _, path = database_url.partition(":///")
    if scheme != "sqlite":
        return _create_users({"MESHBOARD_DATABASE_URL": database_url, **NO_REDIS})
    template, users = _build_sqlite_template()
    Path(path).write_bytes(template)
    return users


@functools.cache
def _build_sqlite_template() -> tuple[bytes, dict[str, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        users = _create_users({"MESHBOARD_DATABASE_URL": f"sqlite:///{folder}/db.sqlite3", **NO_REDIS})
        return Path(folder, "db.sqlite3").read_bytes(), users


def _create_users(settings: dict[str, str]) -> dict[str, dict[str, str]]:
    users: dict[str, dict[str, str]] = json.loads(_run_python(CREATE_USERS, settings).splitlines()[-1])
    return users


def _run_python(source: str, settings: dict[str, str]) -> str:
    argv, environment = [sys.executable, "-c", source], {**base_environment(), **SETTINGS, **settings}
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def create_certificate(folder: Path) -> Path:
    """Create a self-signed certificate for 127.0.0.1, with its key in the same folder."""
    certificate, subject = folder / "ca.pem", ["-subj", "/CN=board", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(certificate)]
    subprocess.run([*OPENSSL, *subject, *files], check=True, capture_output=True)
    return certificate


class TlsSite:
    """A web server with TLS that can be stopped and restarted with the same port and database."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.port = find_free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca = create_certificate(folder)
        self._settings = {
            "MESHBOARD_REDIS_URL": redis.url,
            "MESHBOARD_STATE_DIR": str(folder),
            "MESHBOARD_DATABASE_URL": f"sqlite:///{folder}/board.sqlite3",
            "MESHBOARD_SUBMITS_PER_MINUTE": "1000000",
        }
        self.environment = {**base_environment(), **SETTINGS, **self._settings}
        self.users = _create_users(self._settings)

    def run_python(self, source: str) -> str:
        """Return the output of Python code that uses Django with the database of the site."""
        return _run_python(source, self._settings)

    @contextlib.contextmanager
    def serve(self) -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / "web.log"
        argv = [sys.executable, "-c", SERVE_TLS, str(self.port), str(self.ca), str(self.folder / "key.pem")]
        with run_process(argv, self.environment, log, ROOT) as process:
            wait_until(lambda: not is_free(self.port) or process.poll() is not None, "the board listens")
            assert process.poll() is None, log.read_text()
            yield process
            assert "Traceback" not in log.read_text()
            process.send_signal(signal.SIGTERM)
            process.wait(scale_timeout(20))

    def call(self, method: str, path: str, user: str = "owner") -> Response:
        headers = {"Authorization": f"Token {self.users[user]['token']}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)
        return _send(request, 20, ssl.create_default_context(cafile=self.ca))

    def find_job(self, name: str) -> dict[str, Any] | None:
        """Return all fields of the newest run with this name, or None if there is none."""
        for row in self.call("GET", "/api/v1/jobs").json():
            if row["name"] == name:
                job: dict[str, Any] = self.call("GET", f"/api/v1/jobs/{row['id']}").json()
                return job
        return None

    def wait_for_status(self, name: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for one of these statuses, and fail at once if the run ends with another one."""
        return wait_for_status(lambda: self.find_job(name), name, statuses, timeout_s)
