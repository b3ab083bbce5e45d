"""docker-compose.yml as a project of a container engine, with own ports, secrets, and a certificate."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, wait_until
from tests.support.web import create_certificate
from webapp.runner import find_free_port

PROJECT = "meshboard-containers"
IMAGES = ("meshboard-web", "meshboard-worker")
OVERRIDE_VARIABLE = "CONTAINERS_OVERRIDE"  # a second Compose file
NO_BUILD_VARIABLE = "CONTAINERS_NO_BUILD"
SERVICES = ("redis", "postgres", "web", "proxy", "controller", "recorder", "host")
STATE = "/var/lib/meshboard"  # of host containers
BUILD_TIMEOUT_S = 1500


def find_engine_problem() -> str:
    """Return why no container can start, or an empty text."""
    if shutil.which("docker") is None or shutil.which("docker-compose") is None:
        return "docker or docker-compose is not installed."
    answer = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode == 0:
        return ""
    last_line = (answer.stderr.strip().splitlines() or ["no message"])[-1]
    return f"no container engine answers ({last_line[:200]}). Start dockerd, and run make containers again."


class Project:
    """The running project, its REST API through the proxy, and its containers."""

    def __init__(self, folder: Path) -> None:
        self.https_port, self.http_port = find_free_port(), find_free_port()
        tls = folder / "tls"
        tls.mkdir()
        create_certificate(tls)
        (tls / "ca.pem").rename(tls / "cert.pem")
        for path in tls.iterdir():
            path.chmod(0o644)
        self.trust = ssl.create_default_context(cafile=str(tls / "cert.pem"))
        self.url = f"https://127.0.0.1:{self.https_port}"
        self.secrets = {
            "MESHBOARD_SECRET_KEY": "containers-test-secret-key-0123456789-0123456789-0123456789",
            "MESHBOARD_REDIS_PASSWORD": "containersredis",
            "MESHBOARD_DATABASE_PASSWORD": "containersdatabase",
            "MESHBOARD_JOIN_TOKEN": "containers-test-join-token-0123456789",
        }
        settings = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "MESHBOARD_TLS_DIR": str(tls),
            "MESHBOARD_HTTP_PORT": str(self.http_port),
            "MESHBOARD_HTTPS_PORT": str(self.https_port),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MESHBOARD_")}
        self._environment = inherited | self.secrets | settings
        self._files = ["-f", str(ROOT / "docker-compose.yml")]
        if override := os.environ.get(OVERRIDE_VARIABLE):
            self._files += ["-f", override]
        self._token = ""

    def compose(self, *arguments: str, timeout_s: float = 300, text: str | None = None) -> str:
        """Run docker-compose, and return its output. Raises AssertionError."""
        argv = ["docker-compose", *self._files, *arguments]
        done = subprocess.run(
            argv,
            env=self._environment,
            cwd=ROOT,
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def execute(self, service: str, *argv: str, index: int = 1, text: str | None = None) -> str:
        """Run a command in a container of a service, and return its output."""
        return self.compose("exec", "-T", f"--index={index}", service, *argv, text=text)

    def read_health(self) -> dict[str, str]:
        """Return the status of the container of each service, which ends with its health."""
        argv = ["docker", "ps", "--filter", f"label=com.docker.compose.project={PROJECT}"]
        argv += ["--format", '{{.Label "com.docker.compose.service"}}\t{{.Status}}']
        lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
        return dict(line.split("\t") for line in lines)

    def wait_until_healthy(self, timeout_s: float = 300) -> float:
        """Wait until all services are healthy. Return the seconds."""
        began = time.monotonic()

        def is_healthy() -> bool:
            health = self.read_health()
            return set(health) == set(SERVICES) and all(status.endswith("(healthy)") for status in health.values())

        wait_until(is_healthy, f"all services are healthy: {self.read_health()}", timeout_s, 2)
        return time.monotonic() - began

    def create_login(self) -> str:
        """Return the link that logs in once, and keep the REST token."""
        made = json.loads(self.execute("web", "python", "manage.py", "meshboard_user"))
        self._token = made["api_token"]
        return f"{self.url}{made['one_time_url_path']}"

    def open_pages(self, *urls: str) -> list[tuple[int, str]]:
        """Open pages in turn with one cookie jar, as a browser. Return status and address of each page."""
        handlers = urllib.request.HTTPCookieProcessor(CookieJar()), urllib.request.HTTPSHandler(context=self.trust)
        opener = urllib.request.build_opener(*handlers)
        answers = []
        for url in urls:
            with opener.open(url, timeout=60) as response:
                answers.append((response.status, response.url))
        return answers

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call REST through the proxy. Raises urllib's HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Token {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60, context=self.trust) as response:
            return json.load(response)

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.call("POST", "jobs", spec)["id"])

    def wait_for_job(self, job: str, *statuses: str, timeout_s: float = 240) -> dict[str, Any]:
        """Wait for a status, also while the board restarts."""
        found: dict[str, Any] = {}

        def has_status() -> bool:
            with contextlib.suppress(OSError):
                found.update(self.call("GET", f"jobs/{job}"))
            return found.get("status") in statuses

        wait_until(has_status, f"{job} is {' or '.join(statuses)}", timeout_s, 1)
        return found

    def wait_for_hosts(self, *names: str) -> None:
        def has_hosts() -> bool:
            listed = self.call("GET", "hosts")
            return sorted(host["name"] for host in listed if host["state"] == "connected") == sorted(names)

        wait_until(has_hosts, f"the hosts {names} are connected", 180, 1)


@contextlib.contextmanager
def run_project(folder: Path) -> Iterator[Project]:
    """Build the images and start all services. Remove containers and volumes at the end."""
    project = Project(folder)
    project.compose("down", "--volumes", "--remove-orphans")
    if NO_BUILD_VARIABLE not in os.environ:
        project.compose("build", "web", "host", timeout_s=BUILD_TIMEOUT_S)
    try:
        project.compose("up", "-d", "--no-build", timeout_s=BUILD_TIMEOUT_S)
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")
