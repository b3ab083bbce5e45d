"""What may be wrong with a board: each looked at, none guessed.

What a host has installed beside what the board has.
"""

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
from planner.facts.validation import format_count

PATIENCE_S = 3.0
LATE_S = 30.0
FULL = 0.9  # of maxmemory


def check_board() -> Iterator[Finding]:
    """Everything, in the order in which it is worth mending."""
    yield from _guarded(_redis)
    yield from _guarded(_kept)
    yield _pages()
    yield check_host_name()
    yield check_disk("state", settings.STATE_DIR)
    yield check_disk("histories", settings.HISTORY_DIR)
    versions = ", ".join(
        f"{name} {version}" for name, version in {**get_board_versions(), "django": django.__version__}.items()
    )
    yield Finding("ok", "versions", f"{versions}, on {platform.platform()}")


def _kept() -> Iterator[Finding]:
    """What only the database tells: after the first look that it does not answer, others would but say so again."""
    for look in (_database, _another_board, _controller, _recorder, _hosts):
        yield from look()


def _guarded(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except (redis.RedisError, OSError) as error:
        words = f"Redis at {_place()} does not answer: {error}"
        yield Finding("fail", "Redis", words, "Start Redis, or correct MESHBOARD_REDIS_URL.")
    except Error as error:
        words = str(error).strip().partition("\n")[0]
        advice = "Start the database, or correct MESHBOARD_DATABASE_URL. Then run python manage.py migrate."
        yield Finding("fail", "database", f"the database does not answer: {words}", advice)


def _redis() -> Iterator[Finding]:
    with connect_once(PATIENCE_S) as client:
        before, asked = time.time(), time.monotonic()
        seconds: Any = client.time()
        took = time.monotonic() - asked
        info: Any = client.info()
        kind, version = (
            ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
        )
        yield Finding("ok", "Redis", f"{kind} {version} at {_place()}")
        yield from _memory(info)
        yield _rights(client)
    yield check_clock("Redis", before + took / 2 - (seconds[0] + seconds[1] / 1e6), took / 2)
    given = settings.REDIS_FOR_HOSTS or settings.REDIS_URL
    if is_loopback(given):
        advice = "For hosts on other machines, set MESHBOARD_REDIS_FOR_HOSTS to an address that these hosts can reach."
        yield Finding("warn", "Redis", "hosts get a loopback address, so only this machine can connect", advice)


def _another_board() -> Iterator[Finding]:
    with contextlib.suppress(redis.RedisError, OSError):  # of which `_redis` told
        if other := find_other_board():
            yield Finding("fail", "Redis", f"{OTHER_BOARD_MESSAGE}: {other}", OTHER_BOARD_ADVICE)


def _memory(info: Any) -> Iterator[Finding]:
    most, used, policy = info["maxmemory"], info["used_memory"], info["maxmemory_policy"]
    if policy != "noeviction":
        advice = "Run CONFIG SET maxmemory-policy noeviction, so that Redis never deletes queues and streams."
        yield Finding(
            "warn",
            "Redis",
            f"maxmemory-policy is {policy}, so Redis deletes orders to hosts when its memory is full",
            advice,
        )
    if not most:
        words = f"Redis uses {used / 2**20:.0f} MiB, and maxmemory is not set"
        yield Finding("warn", "Redis", words, "Set maxmemory in Redis. Otherwise, the machine can run out of memory.")
    elif used > FULL * most:
        words = f"Redis uses {used / 2**20:.0f} of {most / 2**20:.0f} MiB and will soon reject messages from hosts"
        yield Finding("fail", "Redis", words, "Raise maxmemory, or find large keys with redis-cli --bigkeys.")
    else:
        yield Finding(
            "ok", "Redis", f"Redis uses {used / 2**20:.0f} of {most / 2**20:.0f} MiB with maxmemory-policy {policy}"
        )


def _rights(client: redis.Redis) -> Finding:
    if settings.REDIS_ACCESS == "shared":
        words = "MESHBOARD_REDIS_ACCESS is `shared`, so every host has the Redis credentials of the board"
        return Finding(
            "warn", "rights", words, "The root user of one host can control all hosts. Use a Redis server with ACLs."
        )
    try:
        check_user_rights(client)
    except NoRightsError as error:
        return Finding(
            "fail",
            "rights",
            str(error),
            "Hosts cannot join. Use a Redis server with ACLs, or set MESHBOARD_REDIS_ACCESS=shared.",
        )
    return Finding("ok", "rights", "each host has its own Redis user")


def _database() -> Iterator[Finding]:
    with connection.cursor() as cursor:
        sqlite = connection.vendor == "sqlite"
        cursor.execute("select sqlite_version()" if sqlite else "show server_version")
        version = cursor.fetchone()[0]
    words = f"{connection.display_name} {version}"
    executor = MigrationExecutor(connection)
    if missing := executor.migration_plan(executor.loader.graph.leaf_nodes()):
        advice = "Run python manage.py migrate."
        yield Finding("fail", "database", f"{words}: {len(missing)} database migrations are not applied", advice)
    elif sqlite:
        yield Finding(
            "ok",
            "database",
            f"{words} works only on a single machine. Use PostgreSQL if web and controller run on different machines",
        )
    else:
        yield Finding("ok", "database", words)


def _pages() -> Finding:
    """Without them pages are bare text, and what is live on them stands still."""
    root, own = Path(settings.STATIC_ROOT), Path(settings.STATICFILES_DIRS[0])
    files = [path.relative_to(own) for path in own.rglob("*") if path.is_file()]
    older = [name for name in files if not _same(own / name, root / name)]
    if not older:
        return Finding("ok", "static", f"static files in {root} match this version of Meshboard")
    words = f"{len(older)} of {len(files)} static files in {root} are missing or from another version"
    return Finding(
        "fail", "static", words, "Run python manage.py collectstatic --no-input, then restart the web server."
    )


def _same(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _controller() -> Iterator[Finding]:
    yield from _worker("controller", "jobs do not start")


def _recorder() -> Iterator[Finding]:
    yield from _worker("recorder", "the data of each run is deleted one day after the run ends")


def _worker(name: str, without: str) -> Iterator[Finding]:
    """A process of which one works at a time."""
    lease = Lease.objects.filter(name=name).exclude(ticked=None).first()
    advice = f"Start the {name} with python manage.py {name}. The log of the {name} shows why it waits."
    if lease is None or lease.ticked is None:
        yield Finding("fail", name, f"never started, so {without}", advice)
        return
    ago = (timezone.now() - lease.ticked).total_seconds()
    words = f"the last tick ended {ago:.0f} s ago in {lease.holder or 'a process that has ended'}"
    yield Finding("fail", name, words, advice) if ago > LATE_S else Finding("ok", name, words)


def _hosts() -> Iterator[Finding]:
    hosts = list(Host.objects.present().order_by("name"))
    if not hosts:
        tokens = JoinToken.objects.filter(revoked=None, expires__gt=timezone.now()).count()
        words = f"no host has joined, and the number of valid join tokens is {tokens}"
        yield Finding(
            "warn", "hosts", words, "Run python manage.py join_token, then python -m workers.host.join on a machine."
        )
    for host in hosts:
        state = get_contact_state(host)
        if state in ("silent", "lost"):
            advice = "Run python -m workers.host.doctor on the host, mark the host as lost, or remove the host."
            yield Finding(
                "warn",
                "host",
                f"host {host.name} has been {state} since {host.last_seen:%Y-%m-%d %H:%M:%S} UTC",
                advice,
            )
        else:
            yield Finding("ok", "host", f"{host.name}: {state}, {format_count(host.slots, 'slot')}, {host.device_name}")
        if host.generation == 0:
            advice = "Run python -m workers.host.join with a token on the host."
            yield Finding(
                "fail", "host", f"host {host.name} has not joined, so Meshboard rejects messages from the host", advice
            )
        for package in list_host_versions(host.facts):
            if package.differs:
                words = f"host {host.name} has {package.name} {package.told}, but the board expects {package.expected}"
                yield Finding(
                    "warn",
                    "host",
                    words,
                    "Install the versions of the board on the host: pip install -c requirements.lock '.[worker]'",
                )
        use = host.use or {}
        if "clock_offset_s" in use:
            clock = check_clock("Redis", use["clock_offset_s"], use["round_trip_s"] / 2)
            if clock.level != "ok":
                yield clock._replace(words=f"{host.name}: {clock.words}")


def _place() -> str:
    """Without what is secret."""
    return settings.REDIS_URL.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")


COMPONENT_NAMES = {
    "meshboard": "Meshboard",
    "python": "Python",
    "torch": "torch",
    "nccl": "NCCL",
    "driver": "NVIDIA driver",
    "cuda": "CUDA of the driver",
}


class HostVersion(NamedTuple):
    """`expected` is empty where the board has no opinion; `differs` in what matters between them."""

    name: str
    told: str
    expected: str
    differs: bool


def list_host_versions(facts: dict[str, Any] | None) -> list[HostVersion]:
    """In the order of NAMES, those that the host told."""
    told = (facts or {}).get("versions", {})
    expected = get_board_versions()
    return [
        HostVersion(words, told[key], expected.get(key, ""), is_version_mismatch(key, told[key], expected.get(key, "")))
        for key, words in COMPONENT_NAMES.items()
        if told.get(key)
    ]


def is_version_mismatch(key: str, told: str, expected: str) -> bool:
    """Python up to its minor version; of the others what follows a plus, as CUDA's, says nothing."""
    if not expected:
        return False
    if key == "python":
        return told.split(".")[:2] != expected.split(".")[:2]
    return told.partition("+")[0] != expected.partition("+")[0]


@cache
def get_board_versions() -> dict[str, str]:
    """The board's own, and the torch that workers are to have."""
    told = {"python": platform.python_version()}
    try:
        told["meshboard"] = version("meshboard")
        pins = [found[1] for line in requires("meshboard") or [] if (found := re.match(r"torch==([\w.]+)", line))]
    except PackageNotFoundError:  # run from its sources
        return told
    return told | ({"torch": pins[0]} if pins else {})
