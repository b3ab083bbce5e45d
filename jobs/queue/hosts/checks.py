"""Check the board for problems, for `manage.py doctor`."""

from __future__ import annotations

import contextlib
import platform
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple

import django
import redis
from django.conf import settings
from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from contracts.doctor import Finding, check_clock, check_disk, check_host_name, is_loopback
from jobs.core.redis_client import connect_once
from jobs.models import Host, JoinToken, Lease
from jobs.queue.hosts.presentation import get_contact_state
from jobs.queue.hosts.redis_access import (
    OTHER_BOARD_ADVICE,
    OTHER_BOARD_MESSAGE,
    NoRightsError,
    check_user_rights,
    find_other_board,
)
from jobs.queue.work_lease import MAX_TICK_AGE_S
from planner.facts.validation import format_count

REDIS_TIMEOUT_S = 3.0
MAX_MEMORY_SHARE = 0.9  # of maxmemory
COMPONENT_NAMES = {
    "meshboard": "Meshboard",
    "python": "Python",
    "torch": "torch",
    "nccl": "NCCL",
    "driver": "NVIDIA driver",
    "cuda": "CUDA of the driver",
}


def check_board() -> Iterator[Finding]:
    """Yield all findings, those to fix first at the beginning."""
    yield from _report_outage(_check_redis)
    yield from _report_outage(_check_database_state)
    yield _check_static_files()
    yield check_host_name()
    yield check_disk("state", settings.STATE_DIR)
    yield check_disk("histories", settings.HISTORY_DIR)
    versions = {**get_board_versions(), "django": django.__version__}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding("ok", "versions", f"{listed}, on {platform.platform()}")


def _check_database_state() -> Iterator[Finding]:
    """Yield the findings that need the database. An outage ends them and is reported once."""
    yield from _check_database()
    with contextlib.suppress(redis.RedisError, OSError):  # `_check_redis` reported them
        if other := find_other_board():
            yield Finding("fail", "Redis", f"{OTHER_BOARD_MESSAGE}: {other}", OTHER_BOARD_ADVICE)
    yield _check_process("controller", "jobs do not start")
    yield _check_process("recorder", "the data of each run is deleted one day after the run ends")
    yield from _check_hosts()


def _report_outage(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, and an outage of Redis or the database as a finding."""
    try:
        yield from check()
    except (redis.RedisError, OSError) as error:
        words = f"Redis at {_format_redis_address()} does not answer: {error}"
        yield Finding("fail", "Redis", words, "Start Redis, or correct MESHBOARD_REDIS_URL.")
    except Error as error:
        words = str(error).strip().partition("\n")[0]
        advice = "Start the database, or correct MESHBOARD_DATABASE_URL. Then run python manage.py migrate."
        yield Finding("fail", "database", f"the database does not answer: {words}", advice)


def _check_redis() -> Iterator[Finding]:
    with connect_once(REDIS_TIMEOUT_S) as client:
        before, began = time.time(), time.monotonic()
        seconds: Any = client.time()
        took = time.monotonic() - began
        info: Any = client.info()
        name, key = ("Valkey", "valkey_version") if "valkey_version" in info else ("Redis", "redis_version")
        yield Finding("ok", "Redis", f"{name} {info[key]} at {_format_redis_address()}")
        yield from _check_redis_memory(info)
        yield _check_rights(client)
    yield check_clock("Redis", before + took / 2 - (seconds[0] + seconds[1] / 1e6), took / 2)
    if is_loopback(settings.REDIS_FOR_HOSTS or settings.REDIS_URL):
        advice = "For hosts on other machines, set MESHBOARD_REDIS_FOR_HOSTS to an address that these hosts can reach."
        yield Finding("warn", "Redis", "hosts get a loopback address, so only this machine can connect", advice)


def _check_redis_memory(info: Any) -> Iterator[Finding]:
    limit, used, policy = info["maxmemory"], info["used_memory"], info["maxmemory_policy"]
    if policy != "noeviction":
        words = f"maxmemory-policy is {policy}, so Redis deletes orders to hosts when its memory is full"
        advice = "Run CONFIG SET maxmemory-policy noeviction, so that Redis never deletes queues and streams."
        yield Finding("warn", "Redis", words, advice)
    if not limit:
        words = f"Redis uses {used / 2**20:.0f} MiB, and maxmemory is not set"
        yield Finding("warn", "Redis", words, "Set maxmemory in Redis. Otherwise, the machine can run out of memory.")
        return
    words = f"Redis uses {used / 2**20:.0f} of {limit / 2**20:.0f} MiB"
    if used > MAX_MEMORY_SHARE * limit:
        advice = "Raise maxmemory, or find large keys with redis-cli --bigkeys."
        yield Finding("fail", "Redis", f"{words} and will soon reject messages from hosts", advice)
    else:
        yield Finding("ok", "Redis", f"{words} with maxmemory-policy {policy}")


def _check_rights(client: redis.Redis) -> Finding:
    if settings.REDIS_ACCESS == "shared":
        words = "MESHBOARD_REDIS_ACCESS is `shared`, so every host has the Redis credentials of the board"
        advice = "The root user of one host can control all hosts. Use a Redis server with ACLs."
        return Finding("warn", "rights", words, advice)
    try:
        check_user_rights(client)
    except NoRightsError as error:
        advice = "Hosts cannot join. Use a Redis server with ACLs, or set MESHBOARD_REDIS_ACCESS=shared."
        return Finding("fail", "rights", str(error), advice)
    return Finding("ok", "rights", "each host has its own Redis user")


def _check_database() -> Iterator[Finding]:
    with connection.cursor() as cursor:
        is_sqlite = connection.vendor == "sqlite"
        cursor.execute("select sqlite_version()" if is_sqlite else "show server_version")
        words = f"{connection.display_name} {cursor.fetchone()[0]}"
    executor = MigrationExecutor(connection)
    if missing := executor.migration_plan(executor.loader.graph.leaf_nodes()):
        advice = "Run python manage.py migrate."
        yield Finding("fail", "database", f"{words}: {len(missing)} database migrations are not applied", advice)
        return
    if is_sqlite:
        words += " works only on a single machine. Use PostgreSQL if web and controller run on different machines"
    yield Finding("ok", "database", words)


def _check_static_files() -> Finding:
    """Check that static files are current. Without them, pages have neither style nor live updates."""
    root, source = Path(settings.STATIC_ROOT), Path(settings.STATICFILES_DIRS[0])
    files = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    outdated = [name for name in files if not _is_same_file(source / name, root / name)]
    if not outdated:
        return Finding("ok", "static", f"static files in {root} match this version of Meshboard")
    words = f"{len(outdated)} of {len(files)} static files in {root} are missing or from another version"
    advice = "Run python manage.py collectstatic --no-input, then restart the web server."
    return Finding("fail", "static", words, advice)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _check_process(name: str, consequence: str) -> Finding:
    """Check the last tick of a process with a `WorkLease`."""
    lease = Lease.objects.filter(name=name).exclude(ticked=None).first()
    advice = f"Start the {name} with python manage.py {name}. The log of the {name} shows why it waits."
    if lease is None or lease.ticked is None:
        return Finding("fail", name, f"never started, so {consequence}", advice)
    age_s = (timezone.now() - lease.ticked).total_seconds()
    words = f"the last tick ended {age_s:.0f} s ago in {lease.holder or 'a process that has ended'}"
    return Finding("fail", name, words, advice) if age_s > MAX_TICK_AGE_S else Finding("ok", name, words)


def _check_hosts() -> Iterator[Finding]:
    hosts = list(Host.objects.present().order_by("name"))
    if not hosts:
        tokens = JoinToken.objects.filter(revoked=None, expires__gt=timezone.now()).count()
        words = f"no host has joined, and the number of valid join tokens is {tokens}"
        advice = "Run python manage.py join_token, then python -m workers.host.join on a machine."
        yield Finding("warn", "hosts", words, advice)
    for host in hosts:
        yield from _check_host(host)


def _check_host(host: Host) -> Iterator[Finding]:
    state = get_contact_state(host)
    if state in ("silent", "lost"):
        words = f"host {host.name} has been {state} since {host.last_seen:%Y-%m-%d %H:%M:%S} UTC"
        advice = "Run python -m workers.host.doctor on the host, mark the host as lost, or remove the host."
        yield Finding("warn", "host", words, advice)
    elif problem := host.get_problem():
        advice = "Fix the problem on the host. The host starts jobs again when its next health check succeeds."
        yield Finding("fail", "host", f"host {host.name} starts no jobs. {problem}", advice)
    else:
        yield Finding("ok", "host", f"{host.name}: {state}, {format_count(host.slots, 'slot')}, {host.device_name}")
    if host.generation == 0:
        words = f"host {host.name} has not joined, so Meshboard rejects messages from the host"
        yield Finding("fail", "host", words, "Run python -m workers.host.join with a token on the host.")
    advice = "Install the versions of the board on the host: pip install -c requirements.lock '.[worker]'"
    for package in list_host_versions(host.facts):
        if package.differs:
            words = f"host {host.name} has {package.name} {package.version}, but the board expects {package.expected}"
            yield Finding("warn", "host", words, advice)
    use = host.use or {}
    if "clock_offset_s" in use:
        clock = check_clock("Redis", use["clock_offset_s"], use["round_trip_s"] / 2)
        if clock.level != "ok":
            yield clock._replace(words=f"{host.name}: {clock.words}")


def _format_redis_address() -> str:
    """Return the address of Redis without its password."""
    return settings.REDIS_URL.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")


class HostVersion(NamedTuple):
    """The version of a component on a host. `expected` is empty if any version is allowed."""

    name: str
    version: str
    expected: str
    differs: bool


def list_host_versions(facts: dict[str, Any] | None) -> list[HostVersion]:
    """List the versions that a host reported."""
    versions, expected = (facts or {}).get("versions", {}), get_board_versions()
    return [
        HostVersion(name, found, expected.get(key, ""), is_version_mismatch(key, found, expected.get(key, "")))
        for key, name in COMPONENT_NAMES.items()
        if (found := versions.get(key))
    ]


def is_version_mismatch(key: str, found: str, expected: str) -> bool:
    """Compare Python by its minor version, and others without a local version such as "+cu128"."""
    if not expected:
        return False
    if key == "python":
        return found.split(".")[:2] != expected.split(".")[:2]
    return found.partition("+")[0] != expected.partition("+")[0]


@cache
def get_board_versions() -> dict[str, str]:
    """Return the versions of the board, and the torch version that workers need."""
    versions = {"python": platform.python_version()}
    try:
        versions["meshboard"] = version("meshboard")
        pins = [found[1] for line in requires("meshboard") or [] if (found := re.match(r"torch==([\w.]+)", line))]
    except PackageNotFoundError:  # run from its sources
        return versions
    return versions | ({"torch": pins[0]} if pins else {})
