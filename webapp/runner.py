"""`make up`: the whole of Meshboard on one machine, in the foreground, state under var/.

Starts Redis, migrates, then runs web, controller, recorder and one host worker on loopback; restarts what dies;
on Ctrl-C stops them, the running jobs' supervisors included, and leaves no process.
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

from contracts.secret import SecretError, in_file
from webapp.environment import RunnerSettings, SettingError, read
from webapp.up.embedded_redis import RedisNotFoundError, find_redis_server, redis_command
from webapp.up.kept import kept_settings
from webapp.up.processes import Child, Fleet
from webapp.up.redis_version import RedisVersion, redis_version, warning
from webapp.up.terminal import say
from workers.host.joined import kept_file

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PORT = 8000
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVICES = ["web", "controller", "recorder", "host"]
# Below those that Linux hands to outgoing connections, one of which might otherwise sit on it while we are down.
PORTS = range(20_000, 32_768)
# The host worker refuses to start where its slots are GPUs that the last one hides.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "SLURM_CONF", "CUDA_VISIBLE_DEVICES")


class StartError(RuntimeError):
    """Something a person has to mend before Meshboard can start."""


def main() -> int:
    # SIGINT too: a shell that starts us in the background has it ignored.
    for number in ENDS:
        signal.signal(number, _interrupt)
    try:
        settings = read(RunnerSettings)
        with single_instance(settings.state_dir):
            run(settings)
    except (StartError, SettingError, SecretError, RedisNotFoundError) as error:
        print(f"meshboard: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def run(settings: RunnerSettings) -> None:
    """Start everything, wait for Ctrl-C, stop everything."""
    started = time.monotonic()
    state = settings.state_dir
    find_redis_server()
    fleet = Fleet(log_dir=state / "log")
    for name, pids in fleet.end_leftovers([*SERVICES, "redis"]).items():
        say(f"Ended what an earlier run, killed outright, had left of {name}: {', '.join(map(str, pids))}.")
    port = web_port(settings.port)
    environment = web_environment(state)
    host_env = host_environment(state, environment)
    isolation = how_jobs_run(host_env)
    up_file = state / "up.json"
    try:
        if keeps_redis():
            fleet.start(embedded_redis(state, environment, settings.redis_maxmemory))
        redis_url = redis_of(environment)
        version = wait_for_redis(redis_url, state)
        if told := warning(version, redis_url):
            print(f"WARNING: {told}", file=sys.stderr)
        if not version.gives_rights and "MESHBOARD_REDIS_ACCESS" not in environment:
            environment["MESHBOARD_REDIS_ACCESS"] = "shared"
            say(f"{version} has no rights to give: the host uses the board's own credentials (docs/howto/deploy.md).")
        kept = kept_file(Path(host_env["MESHBOARD_STATE_DIR"]), host_env["MESHBOARD_HOST_NAME"])
        made = json.loads(manage(environment, "prepare", "--host", str(kept), *known_credentials(up_file)))
        login = made["login"]
        for child in services(environment, {**host_env, "MESHBOARD_JOIN_TOKEN": made["join_token"]}, port):
            fleet.start(child)
        wait_for_web(port, fleet)
        url = f"http://127.0.0.1:{port}"
        once = url + login.pop("one_time_url_path")
        write_private(up_file, json.dumps({"url": url, **login, "pids": fleet.pids()}, indent=2))
        say(f"\nMeshboard is up after {time.monotonic() - started:.1f} s: {url}")
        say(f"  log in once:  {once}")
        password = f"password in {os.path.relpath(up_file)}" if login["password"] else "with the password set since"
        say(f"  or as {login['username']}, {password}")
        say(f"  on            {version}")
        say(f"  isolation     {isolation}")
        say(f"  logs:         {os.path.relpath(state / 'log')}/")
        say("  Ctrl-C stops everything, running jobs too.\n")
        fleet.watch(on_restart=lambda: refresh_pids(up_file, fleet))
    finally:
        for number in ENDS:
            signal.signal(number, signal.SIG_IGN)
        say("Stopping ...")
        fleet.stop(SERVICES)
        if os.path.isdir(host_env["MESHBOARD_RUN_DIR"]):
            stop_jobs = [sys.executable, "-m", "workers.host.stop", host_env["MESHBOARD_RUN_DIR"]]
            subprocess.run(stop_jobs, env=host_env, cwd=ROOT, check=False)
        fleet.stop(["redis"])
        forget_pids(up_file)
        say("Everything has stopped.")


def services(environment: dict[str, str], host_env: dict[str, str], port: int) -> list[Child]:
    """The long-lived services; docker-compose.yml starts the same ones on their own machines."""
    web = f"webapp.serve --port {port}"
    host = f"workers.host.join http://127.0.0.1:{port}"
    return [
        Child("web", [sys.executable, "-m", *web.split()], environment, ROOT),
        Child("controller", [sys.executable, "-m", "webapp.manage", "controller"], environment, ROOT),
        Child("recorder", [sys.executable, "-m", "webapp.manage", "recorder"], environment, ROOT),
        Child("host", [sys.executable, "-m", *host.split()], host_env, ROOT),
    ]


def web_environment(state: Path) -> dict[str, str]:
    """Settings of web, controller and recorder: what the caller set, and defaults for the rest."""
    for name in ("redis_password", "secret_key"):
        secret(state / name)
    redis_port(state)
    given = {k: v for k, v in os.environ.items() if k in PASSED_ON or (v and k.startswith("MESHBOARD_"))}
    defaults = {k: v for k, v in kept_settings(state).items() if f"{k}_FILE" not in given}
    environment = {**defaults, **given, "PYTHONUNBUFFERED": "1"}
    for root in ("DATA_ROOT", "SCRIPT_ROOT"):
        Path(environment[f"MESHBOARD_{root}"]).mkdir(parents=True, exist_ok=True)
    return environment


def keeps_redis() -> bool:
    """Whether nobody named another."""
    name = "MESHBOARD_REDIS_URL"
    return not (os.environ.get(name) or os.environ.get(f"{name}_FILE"))


def redis_of(environment: dict[str, str]) -> str:
    """Its URL. Raises SecretError."""
    return in_file("MESHBOARD_REDIS_URL") or environment["MESHBOARD_REDIS_URL"]


def host_environment(state: Path, environment: dict[str, str]) -> dict[str, str]:
    """Settings of the host worker: its own directories, no database, no secret key; Redis once it has joined."""
    gpus = gpu_count()
    keep = {k: v for k, v in environment.items() if k in (*PASSED_ON, "PYTHONUNBUFFERED")}
    roots = ("CHECKPOINT_ROOT", "DATA_ROOT", "SCRIPT_ROOT")
    bounds = ("LOG_BYTES", "STREAM_BYTES", "KEEP_RUNS_DAYS", "KEEP_RUNS_BYTES")
    wanted = (
        "HOST_NAME",
        "ADDRESS",
        "GROUP_TIMEOUT_S",
        "SLOTS",
        "DEVICE",
        "RUN_DIR",
        "TRAINER_MODULE",
        "JOB_USER",
        "SANDBOX",
        "LOG_FORMAT",
        "STATE_DIR",
        *bounds,
        *roots,
    )
    given = {f"MESHBOARD_{k}": environment[f"MESHBOARD_{k}"] for k in wanted if f"MESHBOARD_{k}" in environment}
    defaults = {
        "MESHBOARD_HOST_NAME": socket.gethostname().split(".")[0] or "localhost",
        "MESHBOARD_DEVICE": "cuda" if gpus else "cpu",
        # Tiny models on gloo share cores well, and four ranks are the least that shows two axes.
        "MESHBOARD_SLOTS": str(gpus or max(4, os.cpu_count() or 1)),
        "MESHBOARD_RUN_DIR": str(state / "runs"),
    }
    return {**keep, **defaults, **given}


def gpu_count() -> int:
    """Number of NVIDIA GPUs the driver lists, 0 without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def embedded_redis(state: Path, environment: dict[str, str], maxmemory: str) -> Child:
    url = environment["MESHBOARD_REDIS_URL"]
    password, _, port = url.removeprefix("redis://:").removesuffix("/0").partition("@127.0.0.1:")
    return Child("redis", redis_command(state / "redis", int(port), password, maxmemory), environment, ROOT)


def wait_for_redis(url: str, state: Path, timeout_s: float = 20.0) -> RedisVersion:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with contextlib.closing(redis.Redis.from_url(url, socket_timeout=2)) as client:
                client.ping()
                return redis_version(client.info("server"))
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                raise StartError(f"Redis did not answer within {timeout_s:.0f} s ({error}); see {state}/log/") from None
            time.sleep(0.05)


def wait_for_web(port: int, fleet: Fleet, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if not fleet.alive("web"):
            break
        time.sleep(0.05)
    raise StartError(f"the web server did not start; the end of its log:\n{fleet.log_tail('web')}")


def web_port(asked: int | None) -> int:
    """The port asked for, or 8000, or any free one when 8000 is taken.

    Raises:
        StartError: when the port asked for is taken.
    """
    if asked is None:
        if is_free(DEFAULT_PORT):
            return DEFAULT_PORT
        port = free_port()
        say(f"Port {DEFAULT_PORT} is taken, using {port}. Set MESHBOARD_PORT to choose one.")
        return port
    if not is_free(asked):
        raise StartError(f"MESHBOARD_PORT={asked} is taken by another program; choose another or leave it unset")
    return asked


def redis_port(state: Path) -> int:
    """The embedded Redis' port, the same at every start: supervisors that outlived the last one know no other."""
    kept = state / "redis_port"
    known = int(kept.read_text()) if kept.exists() else None
    if known is not None and is_free(known):
        return known
    port = free_port()
    if known is not None:
        say(
            f"Port {known}, where Redis was, is taken by another program; it moves to {port}. Jobs that still run from "
            "before know only the old one: they train on, but show nothing new and hear no cancel. "
            "To end them: python -m workers.host.stop " + os.environ.get("MESHBOARD_RUN_DIR", str(state / "runs"))
        )
    write_private(kept, str(port))
    return port


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """One that stays ours while what listens there is started again."""
    return next(p for p in random.SystemRandom().sample(PORTS, len(PORTS)) if is_free(p))


@contextlib.contextmanager
def single_instance(state: Path) -> Iterator[None]:
    """Hold the state directory's lock; two runners on one database would fight over it."""
    import fcntl

    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (state / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StartError(f"Meshboard already runs on {state}; stop it first, or set MESHBOARD_STATE_DIR") from None
        yield


def manage(environment: dict[str, str], *arguments: str) -> str:
    """Run a management command and return its standard output.

    Raises:
        StartError: with the command's own last words.
    """
    argv = [sys.executable, "-m", "webapp.manage", *arguments]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"manage.py {arguments[0]} failed:\n{done.stderr.strip()[-2000:]}")
    return done.stdout


def how_jobs_run(host_env: dict[str, str]) -> str:
    """What the host worker would say of it, in words.

    Raises:
        StartError: with its reason not to start.
    """
    argv = [sys.executable, "-m", "workers.host.apart.isolation"]
    done = subprocess.run(argv, env=host_env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"the host worker cannot start: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def known_credentials(up_file: Path) -> list[str]:
    """Arguments that keep the password and token of an earlier run on the same data."""
    if not up_file.exists():
        return []
    return ["--keep", str(up_file)]


def secret(path: Path) -> str:
    """A random secret kept in a 0600 file, made on first use."""
    if not path.exists():
        write_private(path, secrets.token_urlsafe(48))
    return path.read_text().strip()


def write_private(path: Path, text: str) -> None:
    """Write a 0600 file by rename, so that nobody reads half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
    draft.replace(path)


def refresh_pids(up_file: Path, fleet: Fleet) -> None:
    write_private(up_file, json.dumps({**json.loads(up_file.read_text()), "pids": fleet.pids()}, indent=2))


def forget_pids(up_file: Path) -> None:
    if up_file.exists():
        write_private(up_file, json.dumps({**json.loads(up_file.read_text()), "pids": {}}, indent=2))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
