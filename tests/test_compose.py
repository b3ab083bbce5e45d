"""Check docker-compose.yml, and run the commands of its services until a job succeeds.

A network namespace stands for the compose network. The names redis, postgres, and web are in its hosts file, and
services use their real ports. So only the folder of the state differs from the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from jobs.api.problems import PROBLEM_TYPES
from tests.image import list_steps, parse_dockerfile
from tests.support.processes import ROOT, base_environment, run_process, wait_until
from tests.support.web import create_certificate
from webapp.environment import WebSettings
from webapp.redis_server import find_redis_server
from webapp.runner import find_free_port, is_free

NAMESPACE = "meshboard-compose-test"
SECRETS = {
    "MESHBOARD_SECRET_KEY": "compose-test-secret-key-0123456789-0123456789-0123456789",
    "MESHBOARD_REDIS_PASSWORD": "redispassword",
    "MESHBOARD_DATABASE_PASSWORD": "databasepassword",
    "MESHBOARD_JOIN_TOKEN": "compose-test-join-token-0123456789",
    "MESHBOARD_HTTPS": "1",
    "MESHBOARD_TRUSTED_PROXIES": "127.0.0.1",  # all names of the namespace are
}
HOSTS = Path("/etc/netns") / NAMESPACE / "hosts"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compose")


@pytest.fixture(scope="module")
def services(state: Path) -> dict[str, Any]:
    """Return the file as docker-compose reads it, including hosts with GPUs."""
    environment = {
        **os.environ,
        **SECRETS,
        "MESHBOARD_STATE_DIR": str(state / "web"),
        "MESHBOARD_HOST_STATE_DIR": str(state / "host"),
        "MESHBOARD_RUN_DIR": str(state / "runs"),
        "MESHBOARD_SCRIPT_ROOT": str(state / "scripts"),
        "MESHBOARD_CHECKPOINT_ROOT": str(state / "checkpoints"),
        "MESHBOARD_DATA_ROOT": str(state / "data"),
        "MESHBOARD_JOIN_TOKEN_FILE": str(state / "token"),
    }
    read = subprocess.run(
        ["docker-compose", "-f", str(ROOT / "docker-compose.yml"), "--profile", "gpu", "config"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = yaml.safe_load(read.stdout)["services"]
    return found


def test_compose_file_is_valid_and_hosts_have_no_database(services: dict[str, Any]) -> None:
    assert set(services) == {
        "proxy",
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


def test_services_have_health_checks_and_bounded_logs(services: dict[str, Any]) -> None:
    assert [n for n, s in services.items() if "healthcheck" not in s] == ["join-token", "migrate"]
    assert {s["logging"]["options"]["max-size"] for s in services.values()} == {"10m"}
    assert [
        n for n in ("redis", "postgres", "proxy") if not re.search(r":\d+\.\d+(\.\d+)?$", services[n]["image"])
    ] == []
    # Else the check is refused, and its client ends with 0 all the same.
    assert services["redis"]["environment"]["REDISCLI_AUTH"] == SECRETS["MESHBOARD_REDIS_PASSWORD"]
    assert "grep -q PONG" in services["redis"]["healthcheck"]["test"][1]


def test_services_have_memory_limits_and_only_the_proxy_has_ports(
    services: dict[str, Any],
) -> None:
    assert [name for name, service in services.items() if "mem_limit" not in service] == []
    assert [name for name, service in services.items() if service.get("ports")] == ["proxy"]
    for name in ("web", "controller", "recorder", "migrate", "join-token"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
        # The proxy alone says for whom it asks.
    for name in ("web", "controller", "recorder", "host", "host-gpu"):
        assert services[name]["environment"]["MESHBOARD_LOG_FORMAT"] == "json"
    assert services["proxy"]["networks"]["default"]["ipv4_address"] in (ROOT / "docker-compose.yml").read_text()


def test_hosts_have_few_capabilities_and_no_secret_in_their_environment(services: dict[str, Any]) -> None:
    needed = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_PTRACE"}
    for name in ("host", "host-gpu"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert set(services[name]["cap_add"]) == needed
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
        secret = [value for value in SECRETS.values() if len(value) > 1]
        assert [value for value in services[name]["environment"].values() if value in secret] == []
        assert "join:/var/lib/meshboard-join:ro" in services[name]["volumes"]
    assert [word for word, _ in list_steps("worker") if word == "USER"] == [], "only root starts jobs as other users"


def test_service_addresses_are_unique(services: dict[str, Any]) -> None:
    """Docker gives the lowest free addresses to services without one."""
    [network] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["networks"]["default"]["ipam"]["config"]
    own = {services[name]["networks"]["default"]["ipv4_address"] for name in ("web", "proxy")} | {network["gateway"]}
    every, arguments = IPv4Network(network["subnet"]), IPv4Network(network["ip_range"])
    assert len(own) == 3
    assert [address for address in own if IPv4Address(address) not in every or IPv4Address(address) in arguments] == []
    assert arguments.subnet_of(every)


def test_only_the_gpu_profile_requests_gpus(services: dict[str, Any]) -> None:
    [device] = services["host-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert services["host-gpu"]["environment"]["MESHBOARD_DEVICE"] == "cuda"
    assert "deploy" not in services["host"]
    assert services["host"]["environment"]["MESHBOARD_DEVICE"] == "cpu"
    # Hosts that share a volume keep their attempts apart.
    assert len({services[n]["environment"]["MESHBOARD_RUN_DIR"] for n in ("host", "host-gpu")}) == 2


def test_image_has_static_files_that_no_volume_hides(services: dict[str, Any]) -> None:
    text = (ROOT / "Dockerfile").read_text()
    [static] = re.findall(r"^ENV MESHBOARD_STATIC_ROOT=(\S+)$", text, re.MULTILINE)
    assert text.index("MESHBOARD_STATIC_ROOT") < text.index("collectstatic")
    for service in services.values():
        assert "MESHBOARD_STATIC_ROOT" not in service.get("environment", {})
        for volume in service.get("volumes", []):
            assert not static.startswith(volume.split(":")[1])


def test_images_pin_their_base_and_copy_existing_files() -> None:
    steps = parse_dockerfile(ROOT / "Dockerfile")
    bases = [line.split()[0] for word, line in steps if word == "FROM"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", bases[0])
    assert bases[1:] == ["base", "base"]
    # A changed line of source installs no packages again.
    for target, package in (("web", "jobs"), ("worker", "workers")):
        lines = [f"{word} {rest}" for word, rest in list_steps(target)]
        install = next(n for n, line in enumerate(lines) if f"list_requirements.py {target}" in line and "RUN" in line)
        assert (
            install
            < lines.index(f"COPY {package} {package}")
            < next(n for n, line in enumerate(lines) if "compileall" in line and "chmod -R a+rX" in line)
        )
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [source for word, line in steps if word == "COPY" for source in line.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists() or source in ignored] == []


def test_web_image_has_ssh_for_slurm() -> None:
    [installed] = [line for word, line in list_steps("web") if word == "RUN" and "apt-get install" in line]
    assert "openssh-client" in installed.split()


def test_settings_of_dot_env_reach_their_services(services: dict[str, Any]) -> None:
    images_own = {"MESHBOARD_STATIC_ROOT", "MESHBOARD_DEBUG", "MESHBOARD_TRAINER_MODULE"}
    when_it_joins = {"MESHBOARD_REDIS_URL", "MESHBOARD_HOST_KEY"}
    web = {f"MESHBOARD_{name.upper()}" for name in WebSettings.model_fields} - images_own
    host = set(re.findall(r"MESHBOARD_[A-Z_]*[A-Z]", (ROOT / "workers/host/settings.py").read_text()))
    for name in ("web", "controller", "recorder", "migrate", "join-token"):
        assert sorted(web - set(services[name]["environment"])) == []
    for name in ("host", "host-gpu"):
        assert sorted(host - images_own - when_it_joins - set(services[name]["environment"])) == []


def test_secrets_are_excluded_from_commits_and_builds() -> None:
    secrets = [".env", "tls"]
    request = ["git", "check-ignore", ".env", "tls/key.pem"]
    assert subprocess.run(request, cwd=ROOT, capture_output=True, text=True).stdout.split() == request[2:]
    assert [name for name in secrets if name not in (ROOT / ".dockerignore").read_text().split()] == []


def test_names_a_missing_secret(tmp_path: Path) -> None:
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


def run_in_namespace(argv: list[str]) -> list[str]:
    return ["ip", "netns", "exec", NAMESPACE, *argv]


def build_postgres_command(state: Path) -> list[str]:
    """Return the commands of the image's entrypoint: initdb with the password, then the server."""
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


def build_proxy_command(state: Path) -> list[str]:
    """Return the command of the image, with the file as it is and a certificate."""
    (state / "tls").mkdir()
    create_certificate(state / "tls")
    (state / "tls" / "ca.pem").rename(state / "tls" / "cert.pem")
    shutil.copy(ROOT / "deploy" / "proxy" / "nginx.conf", state / "nginx.conf")
    argv = ["nginx", "-c", str(state / "nginx.conf"), "-p", str(state), "-g", f"daemon off; pid {state}/nginx.pid;"]
    checked = subprocess.run(run_in_namespace([*argv, "-t"]), capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr
    return argv


@pytest.mark.parametrize(
    ("method", "path", "media_type", "reloads"),
    [
        ("GET", "/jobs/", "text/html; charset=utf-8", "5"),
        ("POST", "/jobs/new/", "text/html; charset=utf-8", None),
        ("GET", "/api/v1/jobs", "application/problem+json", None),
    ],
)
def test_proxy_answers_while_the_web_server_restarts(
    tmp_path: Path, method: str, path: str, media_type: str, reloads: str | None
) -> None:
    port = find_free_port()
    (tmp_path / "tls").mkdir()
    certificate = create_certificate(tmp_path / "tls")
    certificate.rename(tmp_path / "tls" / "cert.pem")
    text = (ROOT / "deploy" / "proxy" / "nginx.conf").read_text()
    for old, new in (
        ("listen 80;", f"listen 127.0.0.1:{find_free_port()};"),
        ("listen 443 ", f"listen 127.0.0.1:{port} "),
        ("server web:8000;", f"server 127.0.0.1:{find_free_port()};"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "nginx.conf").write_text(text)
    argv = ["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path), "-g", "daemon off; pid nginx.pid;"]
    trust = ssl.create_default_context(cafile=str(tmp_path / "tls" / "cert.pem"))
    with run_process(argv, base_environment(), tmp_path / "log", tmp_path):
        wait_until(lambda: not is_free(port), "the proxy listens")
        response = httpx.request(method, f"https://127.0.0.1:{port}{path}", verify=trust)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "5")
    assert (response.headers["Content-Type"], response.headers.get("Refresh")) == (media_type, reloads)
    if reloads is None and media_type.startswith("text"):
        assert "may not have saved your input" in response.text
    if media_type.endswith("json"):
        problem = response.json()
        expected = PROBLEM_TYPES[503]
        assert (problem["type"], problem["title"]) == (f"/docs/errors/#{expected.slug}", expected.title)


# A browser: the link that logs in once, then the job's socket until the job has ended.
BROWSER = """
import asyncio, json, socket, ssl, sys, urllib.error, urllib.request as u
from http.cookiejar import CookieJar
from tests.support.telemetry import unpack_messages
from websockets.asyncio.client import connect
ca, once, job = sys.argv[1:]
trust, jar = ssl.create_default_context(cafile=ca), CookieJar()
opener = u.build_opener(u.HTTPCookieProcessor(jar), u.HTTPSHandler(context=trust))
answer = opener.open(u.Request("https://127.0.0.1" + once, headers={"X-Request-ID": "mine"}), timeout=20)
cookies = {c.name: c for c in jar}
assert cookies["__Host-sessionid"].secure and len(answer.headers["X-Request-ID"]) == 32, dict(answer.headers)
many = ssl.create_default_context(cafile=ca)
many.set_alpn_protocols(["h2", "http/1.1"])
with many.wrap_socket(socket.create_connection(("127.0.0.1", 443), 20), server_hostname="127.0.0.1") as tls:
    assert tls.selected_alpn_protocol() == "h2"
old = ssl.create_default_context(cafile=ca)
old.maximum_version = ssl.TLSVersion.TLSv1_2
old.set_ciphers("AES128-SHA:@SECLEVEL=0")
try:
    old.wrap_socket(socket.create_connection(("127.0.0.1", 443), 20), server_hostname="127.0.0.1")
    raise SystemExit("a key that leaks later would open what was recorded")
except ssl.SSLError:
    pass
class Stay(u.HTTPRedirectHandler):
    def redirect_request(self, *_): return None
try:
    u.build_opener(Stay).open("http://127.0.0.1/overview/", timeout=20)
except urllib.error.HTTPError as moved:
    assert (moved.code, moved.headers["Location"]) == (308, "https://127.0.0.1/overview/"), moved.headers
async def watch():
    headers = {"Cookie": "__Host-sessionid=" + cookies["__Host-sessionid"].value}
    async with connect("wss://127.0.0.1/ws/jobs/" + job + "/", ssl=trust, origin="https://127.0.0.1",
                       additional_headers=headers, max_size=None) as socket:
        entries = 0
        async for frame in socket:
            for told in unpack_messages(frame):
                entries += len(told.get("entries", []))
                if told.get("job", {}).get("finished"):
                    print(json.dumps({"status": told["job"]["status"], "entries": entries}))
                    return
asyncio.run(asyncio.wait_for(watch(), 120))
"""


@pytest.mark.slow
def test_service_commands_train_a_job(namespace: None, services: dict[str, Any], state: Path) -> None:
    # pytest's own directory is closed to the postgres user.
    for folder in (state, *state.parents):  # up to where pytest's own directories begin
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    for name in ("web", "host", "runs", "data", "programs"):
        (state / name).mkdir()
    (state / "programs" / "valkey-server").symlink_to(find_redis_server())
    path = f"{state / 'programs'}:{os.environ['PATH']}"

    def environment(name: str) -> dict[str, str]:
        result = services[name].get("environment", {})
        own = {key: str(value) for key, value in result.items() if value is not None}  # None: not set there
        return {"PATH": path, "HOME": str(state), "VIRTUAL_ENV": sys.prefix, "PYTHONUNBUFFERED": "1", **own}

    def command(name: str) -> list[str]:
        argv = shlex.split(services[name]["command"])
        # "python" is the image's; here it is the one that runs the tests.
        return [sys.executable, *argv[1:]] if argv[0] == "python" else argv

    def run(name: str, argv: list[str]) -> str:
        done = subprocess.run(
            run_in_namespace(argv), env=environment(name), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def healthy(name: str) -> bool:
        """The service's own health check, run as the engine would."""
        kind, *words = services[name]["healthcheck"]["test"]
        argv = ["sh", "-c", words[0].replace("$$", "$")] if kind == "CMD-SHELL" else words
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        done = subprocess.run(run_in_namespace(argv), env=environment(name), cwd=ROOT, capture_output=True, check=False)
        return done.returncode == 0

    def started(name: str, argv: list[str], cwd: Path = ROOT) -> Any:
        return run_process(run_in_namespace(argv), environment(name), state / f"{name}.log", cwd)

    with contextlib.ExitStack() as stack:
        stack.enter_context(started("redis", command("redis"), state))
        stack.enter_context(started("postgres", build_postgres_command(state), state))
        wait_until(lambda: "ready to accept" in (state / "postgres.log").read_text(), "PostgreSQL is ready")
        psql = ["psql", "-h", "postgres", "-U", "meshboard", "-d", "postgres", "-c", "CREATE DATABASE meshboard"]
        password = {"PATH": os.environ["PATH"], "PGPASSWORD": SECRETS["MESHBOARD_DATABASE_PASSWORD"]}
        subprocess.run(run_in_namespace(psql), env=password, check=True, capture_output=True)
        run("migrate", command("migrate"))
        assert [name for name in ("web", "host", "proxy") if healthy(name)] == [], "none is, before it runs"
        for name in ("web", "controller", "recorder"):
            stack.enter_context(started(name, command(name)))
        run("join-token", command("join-token"))
        stack.enter_context(started("host", command("host")))
        result = json.loads(run("web", [sys.executable, "manage.py", "meshboard_user"]))
        stack.enter_context(started("proxy", build_proxy_command(state), state))
        call = build_caller(result["api_token"], state / "tls" / "cert.pem")
        wait_until(lambda: call("GET", "hosts"), "the host has announced itself", 90, 0.5)
        spec = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}, "train": {"steps": 4, "warmup_steps": 1}}
        job = call("POST", "jobs", spec)["id"]
        browser = [sys.executable, "-c", BROWSER, str(state / "tls" / "cert.pem"), result["one_time_url_path"], job]
        watched = json.loads(run("web", browser))
        ended = call("GET", f"jobs/{job}")
        assert (ended["status"], ended["host"]) == ("succeeded", "host-1"), ended["exit"]
        assert watched["status"] == "succeeded"
        assert watched["entries"] > 0, "what its ranks sent came through the proxy"
        for name in ("web", "host", "proxy", "controller", "recorder"):
            wait_until(lambda name=name: healthy(name), f"{name} is healthy", 60, 0.5)
        told_by_web = [json.loads(line) for line in (state / "web.log").read_text().splitlines() if line[:1] == "{"]
        assert {line["path"] for line in told_by_web if "path" in line} >= {"/api/v1/jobs", "/login/once/"}
        secret = result["one_time_url_path"].partition("=")[2]
        assert secret not in (state / "web.log").read_text() + (state / "proxy.log").read_text()


def build_caller(token: str, ca: Path) -> Callable[..., Any]:
    """Return a REST client inside the namespace, which uses the proxy and returns None without a response."""

    def call(method: str, path: str, body: Any = None) -> Any:
        script = (
            "import json,ssl,sys,urllib.request as u;"
            "r=u.Request('https://127.0.0.1/api/v1/'+sys.argv[2],method=sys.argv[1],data=sys.argv[3].encode() or None,"
            "headers={'Authorization':'Token '+sys.argv[4],'Content-Type':'application/json'});"
            "print(u.urlopen(r,timeout=10,context=ssl.create_default_context(cafile=sys.argv[5])).read().decode())"
        )
        text = json.dumps(body) if body is not None else ""
        argv = run_in_namespace([sys.executable, "-c", script, method, path, text, token, str(ca)])
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    return call
