"""A board behind TLS with a certificate of a private CA, that can be stopped and started again on its port."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.patience import patient
from tests.support.processes import ROOT, RedisServer, base_environment, running, wait_until
from tests.support.web import PEOPLE, Answer
from webapp.runner import find_free_port, is_free

SERVE = """
import sys, uvicorn
from webapp.serve import build_config
made = build_config("127.0.0.1", int(sys.argv[1]))
made.ssl_certfile, made.ssl_keyfile = sys.argv[2], sys.argv[3]
uvicorn.Server(made).run()
"""
OPENSSL = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody else signed; its key lies beside it."""
    made, subject = folder / "ca.pem", ["-subj", "/CN=board", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(made)]
    subprocess.run([*OPENSSL, *subject, *files], check=True, capture_output=True)
    return made


class TlsBoard:
    """A web server, a database with people in it, and a Redis."""

    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.folder, self.redis = folder, redis
        self.port = find_free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca = self_signed(folder)
        self.environment = {
            **base_environment(),
            "DJANGO_SETTINGS_MODULE": "webapp.settings",
            "MESHBOARD_SECRET_KEY": "only-for-this-test-0123456789-0123456789-0123456789-0123",
            "MESHBOARD_REDIS_URL": redis.url,
            "MESHBOARD_STATE_DIR": str(folder),
            "MESHBOARD_DATABASE_URL": f"sqlite:///{folder}/board.sqlite3",
            "MESHBOARD_SUBMITS_PER_MINUTE": "1000000",
        }
        self.people = json.loads(self.python(PEOPLE).splitlines()[-1])

    def python(self, source: str) -> str:
        """What a piece of Django prints, over the board's database."""
        argv = [sys.executable, "-c", source]
        made = subprocess.run(argv, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return made.stdout

    @contextlib.contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        log = self.folder / "web.log"
        argv = [sys.executable, "-c", SERVE, str(self.port), str(self.ca), str(self.folder / "key.pem")]
        with running(argv, self.environment, log, ROOT) as process:
            wait_until(lambda: not is_free(self.port) or process.poll() is not None, "the board listens")
            assert process.poll() is None, log.read_text()
            yield process
            assert "Traceback" not in log.read_text()
            process.send_signal(signal.SIGTERM)
            process.wait(patient(20))

    def call(self, method: str, path: str, who: str = "owner") -> Answer:
        headers = {"Authorization": f"Token {self.people[who]['token']}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)
        trust = ssl.create_default_context(cafile=self.ca)
        try:
            with urllib.request.urlopen(request, timeout=patient(20), context=trust) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def job(self, name: str) -> dict[str, Any] | None:
        """The newest run of a name, in full; None while there is none."""
        for found in self.call("GET", "/api/v1/jobs").json():
            if found["name"] == name:
                whole: dict[str, Any] = self.call("GET", f"/api/v1/jobs/{found['id']}").json()
                return whole
        return None

    def wait_for(self, name: str, *statuses: str, timeout_s: float = 60.0) -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            found = self.job(name)
            return found if found is not None and found["status"] in statuses else None

        found = wait_until(reached, f"{name} is {' or '.join(statuses)}", timeout_s, 0.2)
        assert found is not None
        return found
