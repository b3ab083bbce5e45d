"""docker-compose.yml: accepted by docker-compose, and each service's very command run by hand until a job succeeds.

A network namespace stands for the compose network: redis, postgres and web are names in its hosts file and the
services use their real ports, so nothing of the file is changed but where the state lies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.image import dockerfile
from tests.support.processes import ROOT, running, wait_until
from webapp.embedded_redis import find_redis_server

NAMESPACE = "meshboard-compose-test"
SECRETS = {
    "MESHBOARD_SECRET_KEY": "compose-test-secret-key-0123456789-0123456789-0123456789",
    "MESHBOARD_REDIS_PASSWORD": "redispassword",
    "MESHBOARD_DATABASE_PASSWORD": "databasepassword",
    "MESHBOARD_JOIN_TOKEN": "compose-test-join-token-0123456789",
    "MESHBOARD_HTTPS": "0",
}
HOSTS = Path("/etc/netns") / NAMESPACE / "hosts"


def composed(state: Path, *options: str) -> dict[str, Any]:
    """The file as docker-compose itself reads it."""
    environment = {
        **os.environ,
        **SECRETS,
        "MESHBOARD_STATE_DIR": str(state / "web"),
        "MESHBOARD_HOST_STATE_DIR": str(state / "host"),
        "MESHBOARD_RUN_DIR": str(state / "runs"),
        "MESHBOARD_SCRIPT_ROOT": str(state / "scripts"),
        "MESHBOARD_CHECKPOINT_ROOT": str(state / "checkpoints"),
        "MESHBOARD_DATA_ROOT": str(state / "data"),
    }
    read = subprocess.run(
        ["docker-compose", "-f", str(ROOT / "docker-compose.yml"), *options, "config"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    services: dict[str, Any] = yaml.safe_load(read.stdout)["services"]
    return services


def test_docker_compose_accepts_the_file_and_the_host_gets_no_database(tmp_path: Path) -> None:
    services = composed(tmp_path)
    assert set(services) == {
        "web",
        "controller",
        "recorder",
        "host",
        "host-gpu",
        "redis",
        "postgres",
        "migrate",
        "join-token",
    }
    environment = " ".join(f"{k}={v}" for k, v in services["host"]["environment"].items())
    assert "DATABASE" not in environment
    assert "SECRET_KEY" not in environment
    assert "REDIS" not in environment


def test_every_service_that_stays_has_a_health_check_and_bounded_logs(tmp_path: Path) -> None:
    services = composed(tmp_path, "--profile", "gpu")
    assert [n for n, s in services.items() if "healthcheck" not in s] == ["join-token", "migrate"]
    assert {s["logging"]["options"]["max-size"] for s in services.values()} == {"10m"}
    assert [n for n in ("redis", "postgres") if not re.search(r":\d+\.\d+(\.\d+)?$", services[n]["image"])] == []
    # Else the check is refused, and its client ends with 0 all the same.
    assert services["redis"]["environment"]["REDISCLI_AUTH"] == SECRETS["MESHBOARD_REDIS_PASSWORD"]
    assert "grep -q PONG" in services["redis"]["healthcheck"]["test"][1]


def test_only_the_gpu_s_own_profile_asks_for_gpus(tmp_path: Path) -> None:
    services = composed(tmp_path, "--profile", "gpu")
    [device] = services["host-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert services["host-gpu"]["environment"]["MESHBOARD_DEVICE"] == "cuda"
    assert "deploy" not in services["host"]
    assert services["host"]["environment"]["MESHBOARD_DEVICE"] == "cpu"
    # Hosts that share a volume keep their attempts apart.
    assert len({services[n]["environment"]["MESHBOARD_RUN_DIR"] for n in ("host", "host-gpu")}) == 2


def test_an_image_brings_its_static_files_and_no_volume_hides_them(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text()
    [static] = re.findall(r"^ENV MESHBOARD_STATIC_ROOT=(\S+)$", text, re.MULTILINE)
    assert text.index("MESHBOARD_STATIC_ROOT") < text.index("collectstatic")
    for service in composed(tmp_path).values():
        assert "MESHBOARD_STATIC_ROOT" not in service.get("environment", {})
        for volume in service.get("volumes", []):
            assert not static.startswith(volume.split(":")[1])


def test_the_images_start_from_one_exact_base_and_copy_what_is_there() -> None:
    steps = dockerfile(ROOT / "Dockerfile")
    bases = [line.split()[0] for word, line in steps if word == "FROM"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases[0])
    assert bases[1:] == ["base", "base"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [source for word, line in steps if word == "COPY" for source in line.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists() or source in ignored] == []


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    read = subprocess.run(
        ["docker-compose", "-f", str(ROOT / "docker-compose.yml"), "config"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode != 0
    assert "MESHBOARD_" in read.stderr


@pytest.fixture
def namespace() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    subprocess.run(["ip", "netns", "delete", NAMESPACE], capture_output=True, check=False)
    HOSTS.parent.mkdir(parents=True, exist_ok=True)
    HOSTS.write_text("127.0.0.1 localhost redis postgres web\n")
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)
        shutil.rmtree(HOSTS.parent)


def inside(argv: list[str]) -> list[str]:
    return ["ip", "netns", "exec", NAMESPACE, *argv]


def postgres_command(state: Path) -> list[str]:
    """What the image's entrypoint does: initdb with the password, then the server as its own user."""
    programs = max(Path("/usr/lib/postgresql").iterdir()) / "bin"
    data, password = state / "postgres", state / "postgres-password"
    password.write_text(SECRETS["MESHBOARD_DATABASE_PASSWORD"])
    data.mkdir()
    for path in (data, password):
        shutil.chown(path, "postgres")
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    initdb = [
        str(programs / "initdb"),
        "-D",
        str(data),
        "-U",
        "meshboard",
        f"--pwfile={password}",
        "-A",
        "scram-sha-256",
    ]
    subprocess.run([*as_postgres, *initdb], check=True, capture_output=True)
    return [*as_postgres, str(programs / "postgres"), "-D", str(data), "-k", str(data)]


def test_every_service_s_command_runs_and_together_they_train_a_job(namespace: None, tmp_path: Path) -> None:
    # pytest's own directory is closed to the postgres user.
    for folder in (tmp_path, *tmp_path.parents):  # up to where pytest's own directories begin
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    services = composed(tmp_path)
    for folder in ("web", "host", "runs", "data", "programs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "programs" / "valkey-server").symlink_to(find_redis_server())
    path = f"{tmp_path / 'programs'}:{os.environ['PATH']}"

    def environment(name: str) -> dict[str, str]:
        own = {key: str(value) for key, value in services[name].get("environment", {}).items()}
        return {"PATH": path, "HOME": str(tmp_path), "VIRTUAL_ENV": sys.prefix, "PYTHONUNBUFFERED": "1", **own}

    def command(name: str) -> list[str]:
        argv = shlex.split(services[name]["command"])
        # "python" is the image's; here it is the one that runs the tests.
        return [sys.executable, *argv[1:]] if argv[0] == "python" else argv

    def run(name: str, *arguments: str) -> str:
        argv = inside([*command(name), *arguments] if not arguments else [sys.executable, "manage.py", *arguments])
        done = subprocess.run(argv, env=environment(name), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def healthy(name: str) -> bool:
        """The service's own health check, run as the engine would."""
        kind, *words = services[name]["healthcheck"]["test"]
        argv = ["sh", "-c", words[0].replace("$$", "$")] if kind == "CMD-SHELL" else words
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        done = subprocess.run(inside(argv), env=environment(name), cwd=ROOT, capture_output=True, check=False)
        return done.returncode == 0

    def started(name: str, argv: list[str], cwd: Path = ROOT) -> Any:
        return running(inside(argv), environment(name), tmp_path / f"{name}.log", cwd)

    with contextlib.ExitStack() as stack:
        stack.enter_context(started("redis", command("redis"), tmp_path))
        stack.enter_context(started("postgres", postgres_command(tmp_path), tmp_path))
        wait_until(lambda: "ready to accept" in (tmp_path / "postgres.log").read_text(), "PostgreSQL is ready")
        psql = ["psql", "-h", "postgres", "-U", "meshboard", "-d", "postgres", "-c", "CREATE DATABASE meshboard"]
        password = {"PATH": os.environ["PATH"], "PGPASSWORD": SECRETS["MESHBOARD_DATABASE_PASSWORD"]}
        subprocess.run(inside(psql), env=password, check=True, capture_output=True)
        required = environment("web")
        required["MESHBOARD_DATABASE_URL"] += "?sslmode=require"
        argv = inside([sys.executable, "manage.py", "migrate"])
        refused = subprocess.run(argv, env=required, cwd=ROOT, capture_output=True, text=True, check=False)
        assert "server does not support SSL" in refused.stderr
        run("migrate")
        run("join-token")
        token = json.loads(run("web", "meshboard_user"))["api_token"]
        checked = [name for name in ("web", "controller", "recorder", "host") if "healthcheck" in services[name]]
        assert [name for name in checked if healthy(name)] == []
        for name in ("web", "controller", "recorder", "host"):
            stack.enter_context(started(name, command(name)))
        for name in checked:
            wait_until(lambda name=name: healthy(name), f"{name} is healthy", 60, 0.5)
        call = caller(token)
        wait_until(lambda: call("GET", "hosts"), "the host has announced itself", 60, 0.5)
        spec = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 4, "warmup_steps": 1}}
        job = call("POST", "jobs", spec)["id"]
        wait_until(lambda: call("GET", f"jobs/{job}")["finished"], "the job has ended", 90, 0.5)
        ended = call("GET", f"jobs/{job}")
        assert (ended["status"], ended["host"]) == ("succeeded", "host-1"), ended["exit"]


def caller(token: str) -> Callable[..., Any]:
    """REST from inside the namespace: urllib in a child, None while nobody answers."""

    def call(method: str, path: str, body: Any = None) -> Any:
        script = (
            "import json,sys,urllib.request as u;"
            "r=u.Request('http://web:8000/api/v1/'+sys.argv[2],method=sys.argv[1],data=sys.argv[3].encode() or None,"
            "headers={'Authorization':'Token '+sys.argv[4],'Content-Type':'application/json','Host':'localhost'});"
            "print(u.urlopen(r,timeout=10).read().decode())"
        )
        text = json.dumps(body) if body is not None else ""
        argv = inside([sys.executable, "-c", script, method, path, text, token])
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    return call
