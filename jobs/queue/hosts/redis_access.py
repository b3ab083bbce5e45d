"""Give each host its own Redis user with minimal rights, and ensure that one board uses a Redis server.

A host uses its own queue and events, reads cancel flags, and writes the streams of its live members. It may also read
which steps are requested, and checkpoints that another host sends. It has no scripts, no administration commands, and
no other keys of other hosts. Rights for single keys need Redis 7.

Two boards on one Redis server would delete each other's users and read each other's events. The controller therefore
claims the server with a key. Controllers of one board recognize each other by their lease in the database.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import redis
from django.conf import settings
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from contracts.names import (
    CANCEL_KEY_PREFIX,
    LEGACY_EVENTS_STREAM,
    events_stream,
    gang_key,
    host_key_prefix,
    loan_key,
    requested_timelines_key,
    telemetry_stream,
)
from jobs.core.credentials import derive_redis_passwords, hash_secret
from jobs.core.redis_client import connect_once
from jobs.models import STREAM_START, Cursor, Host, Lease, Member, get_cursor_name

USER_PREFIX = "meshboard-host-"
TEST_USER = "meshboard-probe"
# Celery's transport on the host's own keys, and the flags.
QUEUE_COMMANDS = (
    *("ping", "time", "echo", "select", "client|setinfo", "client|setname", "multi", "exec", "discard", "watch"),
    *("unwatch", "brpop", "lpush", "rpush", "llen", "sadd", "srem", "smembers", "hset", "hget", "hdel", "zadd", "zrem"),
    *("zrange", "del", "exists", "mget", "pexpire"),
)
EVENT_COMMANDS = ("xadd", "memory|usage")
TELEMETRY_COMMANDS = ("xadd", "xtrim", "expire", "exists")
GANG_COMMANDS = ("hset", "hget", "hgetall", "expire", "exists")
RIGHTS_AFTER_END = timedelta(minutes=10)  # for the last messages of a member
CLAIM_KEY = "meshboard:controller"
CLAIM_S = 30  # without renewal by its controller
TIMEOUT_S = 1.0  # short, because each tick of a controller checks the claim
OTHER_BOARD_MESSAGE = "The controller of another board uses this Redis"
OTHER_BOARD_ADVICE = "Use one Redis per board (MESHBOARD_REDIS_URL)."


class NoRightsError(Exception):
    """Meshboard cannot create Redis users, or another board uses the server. The message says what to do."""


class HostMember(NamedTuple):
    """A member of an attempt on a host. `lender`: the host that sends it a checkpoint."""

    job: str
    attempt: int
    node: int
    is_in_gang: bool
    lender: str = ""


def get_redis_user(host: str) -> str:
    return f"{USER_PREFIX}{host}"


def build_acl_rules(
    host: str, password_hashes: Iterable[str], members: Iterable[HostMember], *, legacy: bool = False
) -> list[str]:
    """Build the complete rules of a host's user for ACL SETUSER.

    `legacy`: the host has not used its own event stream yet, so its version may use the stream of all hosts.
    """
    members = sorted(members)
    event_streams = [events_stream(host), *([LEGACY_EVENTS_STREAM] if legacy else [])]
    telemetry_streams = [telemetry_stream(member.job, member.attempt, member.node) for member in members]
    timelines = sorted({requested_timelines_key(member.job, member.attempt) for member in members})
    gangs = [gang_key(member.job, member.attempt) for member in members if member.is_in_gang]
    loans = [loan_key(member.lender, member.job, member.attempt) for member in members if member.lender]
    selectors = [
        _build_selector(EVENT_COMMANDS, event_streams),
        _build_selector(TELEMETRY_COMMANDS, telemetry_streams),
        _build_selector(("smembers",), timelines, "%R~"),
        _build_selector(GANG_COMMANDS, gangs),
        _build_selector(("hgetall",), loans, "%R~"),
    ]
    return [
        *("reset", "on"),
        *(f"#{hash}" for hash in password_hashes),
        *(f"+{command}" for command in QUEUE_COMMANDS),
        *(f"~{host_key_prefix(host)}*", f"%R~{CANCEL_KEY_PREFIX}*"),
        *filter(None, selectors),
    ]


def _build_selector(commands: Iterable[str], keys: list[str], pattern: str = "~") -> str:
    """Allow commands on these keys only. The pattern "%R~" allows reading only."""
    if not keys:
        return ""
    return f"({' '.join([*(f'+{command}' for command in commands), *(f'{pattern}{key}' for key in keys)])})"


class RedisUsers:
    """Keep the users of Redis equal to the hosts, also after Redis restarts empty."""

    def __init__(self) -> None:
        self._run_id = ""
        self._rules: dict[str, list[str]] = {}  # by user, as last sent to this run of Redis

    def sync(self, client: redis.Redis) -> int:
        """Create, change, and delete users of hosts, and return the number of changes.

        Raises:
            NoRightsError, redis.RedisError.
        """
        if settings.REDIS_ACCESS == "shared":
            return 0
        info: Any = client.info("server")
        if info["run_id"] != self._run_id:
            self._run_id, self._rules = str(info["run_id"]), {}
        existing = {name for name in _run_acl(client, "USERS") if name.startswith(USER_PREFIX)}
        wanted = build_users()
        changed = {user: r for user, r in wanted.items() if user not in existing or self._rules.get(user) != r}
        for user, rules in changed.items():
            _run_acl(client, "SETUSER", user, *rules)
            self._rules[user] = rules
        removed = existing - set(wanted)
        if removed:
            _run_acl(client, "DELUSER", *removed)
        self._rules = {user: rules for user, rules in self._rules.items() if user in wanted}
        return len(changed) + len(removed)


def create_user(client: redis.Redis, host: Host) -> None:
    """Create the user of a host now.

    Raises:
        NoRightsError, redis.RedisError.
    """
    _check_own_board()
    if settings.REDIS_ACCESS != "shared":
        for user, rules in build_users(Host.objects.filter(pk=host.pk)).items():
            _run_acl(client, "SETUSER", user, *rules)


def delete_user(client: redis.Redis, host: Host) -> None:
    """Delete the user of a host with its connections and events.

    Raises:
        NoRightsError, redis.RedisError.
    """
    _check_own_board()
    if settings.REDIS_ACCESS != "shared":
        _run_acl(client, "DELUSER", get_redis_user(host.name))
    client.delete(events_stream(host.name))


def check_user_rights(client: redis.Redis) -> None:
    """Create and delete a disabled user.

    Raises:
        NoRightsError, redis.RedisError: Hosts cannot get users.
    """
    rules = build_acl_rules("probe", [], [])
    _run_acl(client, "SETUSER", TEST_USER, *["off" if rule == "on" else rule for rule in rules])
    _run_acl(client, "DELUSER", TEST_USER)


def build_users(hosts: QuerySet[Host] | None = None) -> dict[str, list[str]]:
    """Build the rules of the users of all joined hosts, or of those among `hosts`."""
    chosen = (Host.objects.all() if hosts is None else hosts).filter(removed=None, generation__gt=0)
    members: dict[int, list[HostMember]] = {}
    for key, member in _list_members(chosen):
        members.setdefault(key, []).append(member)
    used_cursors = set(Cursor.objects.exclude(position=STREAM_START).values_list("name", flat=True))
    secrets = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return {
        get_redis_user(name): build_acl_rules(
            name,
            _hash_passwords(name, generation, secrets),
            members.get(key, []),
            legacy=get_cursor_name(name) not in used_cursors,
        )
        for key, name, generation in chosen.values_list("pk", "name", "generation")
    }


def _list_members(hosts: QuerySet[Host]) -> list[tuple[Any, HostMember]]:
    """List the members that may send messages, with the keys of their hosts. Node 0 receives the checkpoint."""
    active = Q(ended=None) | Q(ended__gt=timezone.now() - RIGHTS_AFTER_END)
    rows = Member.objects.filter(active, host__in=hosts).order_by().annotate(members=Count("attempt__members"))
    values = rows.values_list(
        "host_id", "attempt__job_id", "attempt__number", "node", "members", "attempt__loan__host__name"
    )
    return [
        (key, HostMember(job, number, node, members > 1, lender or "" if node == 0 else ""))
        for key, job, number, node, members, lender in values
    ]


@lru_cache(maxsize=2048)
def _hash_passwords(name: str, generation: int, _secrets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(hash_secret(password) for password in derive_redis_passwords(name, generation))


def _check_own_board() -> None:
    """Raise NoRightsError if another board uses the server, because it may have a host with an equal name."""
    if other := find_other_board():
        raise NoRightsError(f"{OTHER_BOARD_MESSAGE} ({other}). {OTHER_BOARD_ADVICE}")


def _run_acl(client: redis.Redis, *words: str) -> Any:
    try:
        return client.execute_command(f"ACL {words[0]}", *words[1:])  # type: ignore[no-untyped-call]
    except redis.exceptions.NoPermissionError as error:
        problem = f"Redis does not let Meshboard create users: {error}"
    except redis.ResponseError as error:
        problem = f"Redis rejected the permissions of a host, which need Redis 7 or later: {error}"
    raise NoRightsError(f"{problem}. See MESHBOARD_REDIS_ACCESS in docs/explanation/host-security.md")


class RedisClaim:
    """Claim the Redis server for this board's controller. Methods raise the errors of Redis."""

    def __init__(self) -> None:
        self._client = _connect()

    def hold(self, own: str, previous: str) -> str:
        """Claim the server or renew the claim. Return the holder if it is a controller of another board.

        `previous`: the holder before this controller, of the same board.
        """
        if self._client.set(CLAIM_KEY, own, nx=True, ex=CLAIM_S):
            return ""
        holder = _get_claim_holder(self._client)
        if holder not in ("", own, previous):
            return holder
        self._client.set(CLAIM_KEY, own, ex=CLAIM_S)
        return ""

    def release(self, own: str) -> None:
        """Let the controller of another board start at once."""
        if _get_claim_holder(self._client) == own:
            self._client.delete(CLAIM_KEY)

    def close(self) -> None:
        self._client.close()


def find_other_board() -> str:
    """Return the controller of another board that uses this Redis server, or an empty text."""
    with _connect() as client:
        holder = _get_claim_holder(client)
    return "" if not holder or Lease.objects.filter(holder=holder).exists() else holder


def _connect() -> redis.Redis:
    client = connect_once(TIMEOUT_S)
    if settings.REDIS_ACCESS != "shared":  # users belong to the whole server, so the claim is in database 0
        client.connection_pool.connection_kwargs["db"] = 0
    return client


def _get_claim_holder(client: redis.Redis) -> str:
    holder: Any = client.get(CLAIM_KEY)
    return (holder or b"").decode(errors="replace")
