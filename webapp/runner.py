"""`make up`: run all of Meshboard on one machine, in the foreground, with its state below var/.

Starts Redis and migrates the database. Then runs web, controller, recorder, and a host worker on loopback.
Restarts a service that ends. On Ctrl-C it stops all services and the supervisors of running jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import redis

from contracts.security import SecretError, read_secret_file
from webapp.environment import RunnerSettings, SettingError, read_settings
from webapp.installation import read_stored_settings
from webapp.processes import ProcessManager, Service, print_line
from webapp.redis_server import (
    RedisNotFoundError,
    RedisVersion,
    build_redis_command,
    find_redis_server,
    get_vulnerability_warning,
    parse_redis_version,
)
from workers.host.settings import get_credentials_file

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PORT = 8000
LOGIN_LINK_MINUTES = 15
REDIS_TIMEOUT_S = 60.0
START_TIMEOUT_S = 180.0  # of the web server. On a busy machine, imports take over a minute
SLOW_START_S = 20.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVICES = ["web", "controller", "recorder", "host"]
# Linux uses higher ports for outgoing connections, which could take the port while Redis is down.
LISTEN_PORTS = range(20_000, 32_768)
# The host worker does not start if CUDA_VISIBLE_DEVICES hides GPUs that are slots.
PASSED_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "SLURM_CONF",
    "CUDA_VISIBLE_DEVICES",
)


class StartError(RuntimeError):
    """A problem that a person needs to fix before Meshboard can start."""


def main() -> int:
    # A shell that starts this process in the background makes it ignore SIGINT.
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        settings = read_settings(RunnerSettings)
        with lock_state(settings.state_dir):
            run(settings)
    except (StartError, SettingError, SecretError, RedisNotFoundError) as error:
        print(f"meshboard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def run(settings: RunnerSettings) -> None:
    """Start all services, wait for Ctrl-C, and stop all services."""
    started = time.monotonic()
    state = settings.state_dir
    find_redis_server()
    fleet = ProcessManager(log_dir=state / "log")
    for name, pids in fleet.stop_leftovers([*SERVICES, "redis"]).items():
        print_line(f"Stopped {name} of an earlier run (PID {', '.join(map(str, pids))}).")
    port = choose_web_port(settings.port)
    environment = build_web_environment(state)
    host_env = build_host_environment(state, environment)
    isolation = describe_isolation(host_env)
    up_file = state / "up.json"
    try:
        print_line("Starting Redis…" if runs_own_redis() else "Connecting to Redis…")
        if runs_own_redis():
            fleet.start(make_redis_service(state, environment, settings.redis_maxmemory))
        redis_url = get_redis_url(environment)
        version = wait_for_redis(redis_url, state)
        if warning := get_vulnerability_warning(version, redis_url):
            print(f"WARNING: {warning}", file=sys.stderr)
        if not version.supports_key_permissions and "MESHBOARD_REDIS_ACCESS" not in environment:
            environment["MESHBOARD_REDIS_ACCESS"] = "shared"
            print_line(f"{version} has no access rights for hosts, so hosts use the credentials of the board.")
            print_line("See docs/howto/deploy.md.")
        print_line("Preparing the database…")
        host_credentials = get_credentials_file(Path(host_env["MESHBOARD_STATE_DIR"]), host_env["MESHBOARD_HOST_NAME"])
        made = json.loads(
            run_manage(environment, "prepare", "--host", str(host_credentials), *get_credential_arguments(up_file))
        )
        login = made["login"]
        print_line("Starting web, controller, recorder, and host worker…")
        for child in list_services(environment, {**host_env, "MESHBOARD_JOIN_TOKEN": made["join_token"]}, port):
            fleet.start(child)
        wait_for_web(port, fleet)
        url = f"http://127.0.0.1:{port}"
        once = url + login.pop("one_time_url_path")
        write_private(up_file, json.dumps({"url": url, **login, "pids": fleet.get_pids()}, indent=2))
        password = f"password in {os.path.relpath(up_file)}" if login["password"] else "your own password"
        print_line(f"\nMeshboard is ready after {time.monotonic() - started:.1f} s: {url}\n")
        print_line(f"To log in, open this link within {LOGIN_LINK_MINUTES} minutes. It works once:\n")
        print_line(f"  {once}\n")
        print_line(f"  User       {login['username']}, {password}")
        print_line(f"  Logs       {os.path.relpath(state / 'log')}/")
        print_line(f"  Broker     {version}")
        print_line(f"  Isolation  {isolation}\n")
        print_line("Press Ctrl-C to stop Meshboard and all running jobs.\n")
        fleet.watch(on_restart=lambda: refresh_pids(up_file, fleet))
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        print_line("Stopping Meshboard and its jobs…")
        fleet.stop(SERVICES)
        if os.path.isdir(host_env["MESHBOARD_RUN_DIR"]):
            stop_jobs = [sys.executable, "-m", "workers.host.stop", host_env["MESHBOARD_RUN_DIR"]]
            subprocess.run(stop_jobs, env=host_env, cwd=ROOT, check=False)
        fleet.stop(["redis"])
        clear_pids(up_file)
        print_line("Meshboard has stopped.")


def list_services(environment: dict[str, str], host_env: dict[str, str], port: int) -> list[Service]:
    """Return the long-lived services. docker-compose.yml starts equal services on their own machines."""
    web = f"webapp.serve --port {port}"
    host = f"workers.host.join http://127.0.0.1:{port}"
    return [
        Service("web", [sys.executable, "-m", *web.split()], environment, ROOT),
        Service("controller", [sys.executable, "-m", "webapp.manage", "controller"], environment, ROOT),
        Service("recorder", [sys.executable, "-m", "webapp.manage", "recorder"], environment, ROOT),
        Service("host", [sys.executable, "-m", *host.split()], host_env, ROOT),
    ]


def build_web_environment(state: Path) -> dict[str, str]:
    """Return the settings of web, controller, and recorder: environment variables, and defaults for the rest."""
    for name in ("redis_password", "secret_key"):
        load_secret(state / name)
    choose_redis_port(state)
    values = {k: v for k, v in os.environ.items() if k in PASSED_VARIABLES or (v and k.startswith("MESHBOARD_"))}
    defaults = {k: v for k, v in read_stored_settings(state).items() if f"{k}_FILE" not in values}
    environment = {**defaults, **values, "PYTHONUNBUFFERED": "1"}
    for root in ("DATA_ROOT", "SCRIPT_ROOT"):
        Path(environment[f"MESHBOARD_{root}"]).mkdir(parents=True, exist_ok=True)
    return environment


def runs_own_redis() -> bool:
    """Return whether Meshboard runs its own Redis, because no other Redis is set."""
    name = "MESHBOARD_REDIS_URL"
    return not (os.environ.get(name) or os.environ.get(f"{name}_FILE"))


def get_redis_url(environment: dict[str, str]) -> str:
    """Return the URL of Redis. Raises SecretError."""
    return read_secret_file("MESHBOARD_REDIS_URL") or environment["MESHBOARD_REDIS_URL"]


def build_host_environment(state: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the settings of the host worker, without the database, the secret key, and Redis."""
    gpus = count_gpus()
    keep = {k: v for k, v in environment.items() if k in (*PASSED_VARIABLES, "PYTHONUNBUFFERED")}
    roots = ("CHECKPOINT_ROOT", "DATA_ROOT", "SCRIPT_ROOT")
    bounds = (
        "LOG_BYTES",
        "STREAM_BYTES",
        "KEEP_RUNS_DAYS",
        "KEEP_RUNS_BYTES",
        "MIN_FREE_BYTES",
        "JOB_DISK_BYTES",
        "JOB_MEMORY_BYTES",
        "JOB_CPUS",
        "JOB_PROCESSES",
        "JOB_OPEN_FILES",
        "SHARED_GPU_BYTES",
        "UPLOAD_ENVIRONMENTS",
    )
    wanted = (
        "HOST_NAME",
        "ADDRESS",
        "GROUP_TIMEOUT_S",
        "SLOTS",
        "DEVICE",
        "RUN_DIR",
        "TRAINER_MODULE",
        "JOB_USER",
        "ALLOW_ROOT_JOBS",
        "SANDBOX",
        "CONTROL_GROUPS",
        "LOG_FORMAT",
        "LOG_LEVEL",
        "STATE_DIR",
        *bounds,
        *roots,
    )
    values = {f"MESHBOARD_{k}": environment[f"MESHBOARD_{k}"] for k in wanted if f"MESHBOARD_{k}" in environment}
    defaults = {
        "MESHBOARD_HOST_NAME": socket.gethostname().split(".")[0] or "localhost",
        "MESHBOARD_DEVICE": "cuda" if gpus else "cpu",
        # Tiny models on gloo share cores well, and four ranks are the least that shows two axes.
        "MESHBOARD_SLOTS": str(gpus or max(4, os.cpu_count() or 1)),
        "MESHBOARD_RUN_DIR": str(state / "runs"),
    }
    return {**keep, **defaults, **values}


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver lists, or 0 without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def make_redis_service(state: Path, environment: dict[str, str], maxmemory: str) -> Service:
    url = environment["MESHBOARD_REDIS_URL"]
    password, _, port = url.removeprefix("redis://:").removesuffix("/0").partition("@127.0.0.1:")
    return Service("redis", build_redis_command(state / "redis", int(port), password, maxmemory), environment, ROOT)


def wait_for_redis(url: str, state: Path, timeout_s: float = REDIS_TIMEOUT_S) -> RedisVersion:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with contextlib.closing(redis.Redis.from_url(url, socket_timeout=2)) as client:
                client.ping()
                return parse_redis_version(client.info("server"))
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                raise StartError(f"Redis did not answer in {timeout_s:.0f} s: {error}. Read {state}/log/.") from None
            time.sleep(0.05)


def wait_for_web(port: int, fleet: ProcessManager, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until the web server accepts connections.

    Raises:
        StartError: It ended, or is silent for `timeout_s`.
    """
    start, is_slow = time.monotonic(), False
    while fleet.is_alive("web"):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            raise StartError(f"The web server did not answer in {timeout_s:.0f} s. Read {fleet.get_log('web')}.")
        if waited_s > SLOW_START_S and not is_slow:
            is_slow = True
            print_line(f"The web server is still starting. Meshboard waits for up to {timeout_s:.0f} s.")
        time.sleep(0.05)
    raise StartError(f"The web server did not start. Its log ends with:\n{fleet.read_log_tail('web')}")


def choose_web_port(requested: int | None) -> int:
    """Return the requested port, else 8000, else any free port.

    Raises:
        StartError: another program uses the requested port.
    """
    if requested is None:
        if is_free(DEFAULT_PORT):
            return DEFAULT_PORT
        port = find_free_port()
        print_line(f"Another program uses port {DEFAULT_PORT}, so Meshboard uses {port}. Set MESHBOARD_PORT to choose.")
        return port
    if not is_free(requested):
        raise StartError(f"Another program uses port {requested}. Set MESHBOARD_PORT to another port, or unset it.")
    return requested


def choose_redis_port(state: Path) -> int:
    """Return the port of the embedded Redis. It stays equal, because supervisors of an earlier run know only this."""
    port_file = state / "redis_port"
    known = int(port_file.read_text()) if port_file.exists() else None
    if known is not None and is_free(known):
        return known
    port = find_free_port()
    if known is not None:
        print_line(
            f"Another program uses port {known} of Redis, so Redis uses {port}. Jobs of an earlier run continue, but "
            "they send no data and you cannot cancel them. To stop these jobs, run: python -m workers.host.stop "
            + os.environ.get("MESHBOARD_RUN_DIR", str(state / "runs"))
        )
    write_private(port_file, str(port))
    return port


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def find_free_port() -> int:
    """Return a free port outside the range of outgoing connections, so a restarted service gets it again."""
    return next(p for p in random.SystemRandom().sample(LISTEN_PORTS, len(LISTEN_PORTS)) if is_free(p))


@contextlib.contextmanager
def lock_state(state: Path) -> Iterator[None]:
    """Hold the lock of the state directory, because two runners must not share a database."""
    import fcntl

    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (state / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(f"Meshboard already runs on {state}. Stop it first, or set MESHBOARD_STATE_DIR.") from None
        yield


def run_manage(environment: dict[str, str], *arguments: str) -> str:
    """Run a management command and return its standard output.

    Raises:
        StartError: the command failed. Has the end of its error output.
    """
    argv = [sys.executable, "-m", "webapp.manage", *arguments]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"The command manage.py {arguments[0]} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def describe_isolation(host_env: dict[str, str]) -> str:
    """Return the isolation of jobs in words.

    Raises:
        StartError: the host worker cannot start. Has its reason.
    """
    argv = [sys.executable, "-m", "workers.host.isolation"]
    done = subprocess.run(argv, env=host_env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"The host worker cannot start: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def get_credential_arguments(up_file: Path) -> list[str]:
    """Return the arguments that keep the password and token of an earlier run with this data."""
    if not up_file.exists():
        return []
    return ["--keep", str(up_file)]


def load_secret(path: Path) -> str:
    """Return the random secret in a 0600 file. The first call creates the file."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(48))
    return path.read_text().strip()


def write_private(path: Path, text: str) -> None:
    """Write a 0600 file by rename, because a reader must not see half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    draft.replace(path)


def refresh_pids(up_file: Path, fleet: ProcessManager) -> None:
    write_private(up_file, json.dumps({**json.loads(up_file.read_text()), "pids": fleet.get_pids()}, indent=2))


def clear_pids(up_file: Path) -> None:
    if up_file.exists():
        write_private(up_file, json.dumps({**json.loads(up_file.read_text()), "pids": {}}, indent=2))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
