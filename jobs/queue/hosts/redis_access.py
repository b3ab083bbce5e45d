"""What a host may do in Redis, as the rules of a user of its own. Needs Redis 7: rights that are of single keys.

Beyond its own queue and its own events, it reads flags of cancellation, and for its own members while they live writes
to their streams, and reads which steps are asked for and where another host lends them a checkpoint. No script, no
administration, no other key of another host's.

Keeps Redis' users in step with the hosts there are: a Redis that came back empty knows none of them.

A Redis serves one board: by a key in it, the controller of a second one notices and keeps its hands off.

Two would take each other's hosts for strangers: each takes away the users that the other makes, and where hosts are
called alike, each eats what the other's say. Controllers of one board know each other by their lease in its database.
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
FIRST_VERSION = (7, 0)  # of Redis, with rights for single keys

# Celery's transport on the host's own keys, and the flags.
OF_A_QUEUE = (
    *("ping", "time", "echo", "select", "client|setinfo", "client|setname", "multi", "exec", "discard", "watch"),
    *("unwatch", "brpop", "lpush", "rpush", "llen", "sadd", "srem", "smembers", "hset", "hget", "hdel", "zadd", "zrem"),
    *("zrange", "del", "exists", "mget", "pexpire"),
)
TO_SAY = ("xadd", "memory|usage")
OF_A_STREAM = ("xadd", "xtrim", "expire", "exists")
OF_A_GANG = ("hset", "hget", "hgetall", "expire", "exists")


class HostMember(NamedTuple):
    """A member of an attempt on this host."""

    job: str
    attempt: int
    node: int
    in_a_gang: bool
    lender: str = ""  # the host that sends it a checkpoint


def get_redis_user(host: str) -> str:
    return f"{USER_PREFIX}{host}"


def build_acl_rules(
    host: str, password_hashes: Iterable[str], shares: Iterable[HostMember], *, older: bool = False
) -> list[str]:
    """For ACL SETUSER: all there is, whatever was before.

    `older`: it was not heard yet on a stream of its own, so its version may know only that of all hosts.
    """
    shares = sorted(shares)
    streams = [telemetry_stream(share.job, share.attempt, share.node) for share in shares]
    wanted = sorted({requested_timelines_key(share.job, share.attempt) for share in shares})
    gangs = [gang_key(share.job, share.attempt) for share in shares if share.in_a_gang]
    loans = [loan_key(share.lender, share.job, share.attempt) for share in shares if share.lender]
    told = ["reset", "on", *(f"#{one}" for one in password_hashes)]
    told += [f"+{command}" for command in OF_A_QUEUE]
    told += [f"~{host_key_prefix(host)}*", f"%R~{CANCEL_KEY_PREFIX}*"]
    told.append(_apart(TO_SAY, [events_stream(host), *([LEGACY_EVENTS_STREAM] if older else [])]))
    told += [_apart(OF_A_STREAM, streams)] if streams else []
    told += [_apart(("smembers",), wanted, "%R~")] if wanted else []
    told += [_apart(OF_A_GANG, gangs)] if gangs else []
    told += [_apart(("hgetall",), loans, "%R~")] if loans else []
    return told


def _apart(commands: Iterable[str], keys: Iterable[str], on: str = "~") -> str:
    """Commands that are for these keys alone; `on` "%R~" to read them only."""
    return f"({' '.join([*(f'+{command}' for command in commands), *(f'{on}{key}' for key in keys)])})"


PROBE = "meshboard-probe"
RIGHTS_AFTER_END = timedelta(minutes=10)  # after its end a member may still say the rest


class NoRightsError(Exception):
    """Redis does not let us make users, or is another board's; says what to do."""


class RedisUsers:
    """A stage of the controller; remembers what it told which Redis."""

    def __init__(self) -> None:
        self._run = ""
        self._told: dict[str, list[str]] = {}

    def sync(self, client: redis.Redis) -> int:
        """Give each host its user, its rights as they are now, and nobody else one; returns how many changed.

        Raises:
            NoRightsError, redis.RedisError.
        """
        if settings.REDIS_ACCESS == "shared":
            return 0
        run = _of_this_start(client)
        if run != self._run:
            self._run, self._told = run, {}
        there = _users(client)
        wanted = build_users()
        changed = {user: told for user, told in wanted.items() if user not in there or self._told.get(user) != told}
        gone = there - set(wanted)
        for user, told in changed.items():
            _command(client, "SETUSER", user, *told)
            self._told[user] = told
        if gone:
            _command(client, "DELUSER", *gone)
        self._told = {user: told for user, told in self._told.items() if user in wanted}
        return len(changed) + len(gone)


def create_user(client: redis.Redis, host: Host) -> None:
    """Give one host its user now. Raises NoRightsError, redis.RedisError."""
    _refuse_on_anothers()
    if settings.REDIS_ACCESS != "shared":
        for user, told in build_users(Host.objects.filter(pk=host.pk)).items():
            _command(client, "SETUSER", user, *told)


def delete_user(client: redis.Redis, host: Host) -> None:
    """Take a host's user away, its connections and what it said last. Raises NoRightsError, redis.RedisError."""
    _refuse_on_anothers()
    if settings.REDIS_ACCESS != "shared":
        _command(client, "DELUSER", get_redis_user(host.name))
    client.delete(events_stream(host.name))


def check_user_rights(client: redis.Redis) -> None:
    """Whether hosts could be given users: one is made, and taken away. Raises NoRightsError, redis.RedisError."""
    rights = build_acl_rules("probe", [], [])
    _command(client, "SETUSER", PROBE, *["off" if word == "on" else word for word in rights])
    _command(client, "DELUSER", PROBE)


def build_users(hosts: QuerySet[Host] | None = None) -> dict[str, list[str]]:
    """Of every user that there should be, by name."""
    chosen = (Host.objects.all() if hosts is None else hosts).filter(removed=None, generation__gt=0)
    shares: dict[int, list[HostMember]] = {}
    for pk, *share in _live_members(chosen):
        shares.setdefault(pk, []).append(HostMember._make(share))
    heard = set(Cursor.objects.exclude(position=STREAM_START).values_list("name", flat=True))
    return {
        get_redis_user(name): build_acl_rules(
            name, _hashes(name, generation, _secrets()), shares.get(pk, []), older=get_cursor_name(name) not in heard
        )
        for pk, name, generation in chosen.values_list("pk", "name", "generation")
    }


def _live_members(hosts: QuerySet[Host]) -> Iterable[Any]:
    """Host, job, attempt, node, whether there are others, who lends it a checkpoint: to node 0 alone."""
    saying = Q(ended=None) | Q(ended__gt=timezone.now() - RIGHTS_AFTER_END)
    rows = Member.objects.filter(saying, host__in=hosts).order_by().annotate(members=Count("attempt__members"))
    told = rows.values_list(
        "host_id", "attempt__job_id", "attempt__number", "node", "members", "attempt__loan__host__name"
    )
    return [
        (host, job, number, node, members > 1, lender or "" if node == 0 else "")
        for host, job, number, node, members, lender in told
    ]


@lru_cache(maxsize=2048)
def _hashes(name: str, generation: int, _of: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(hash_secret(password) for password in derive_redis_passwords(name, generation))


def _secrets() -> tuple[str, ...]:
    return (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)


def _refuse_on_anothers() -> None:
    """There a host of this name may be another board's."""
    if other := find_other_board():
        raise NoRightsError(f"{OTHER_BOARD_MESSAGE} ({other}). {OTHER_BOARD_ADVICE}")


def _users(client: redis.Redis) -> set[str]:
    return {name for name in _command(client, "USERS") if name.startswith(USER_PREFIX)}


def _of_this_start(client: redis.Redis) -> str:
    told: Any = client.info("server")
    return str(told["run_id"])


def _command(client: redis.Redis, *words: str) -> Any:
    try:
        return client.execute_command(f"ACL {words[0]}", *words[1:])  # type: ignore[no-untyped-call]
    except redis.exceptions.NoPermissionError as error:
        problem = f"Redis does not let Meshboard create users: {error}"
    except redis.ResponseError as error:
        problem = f"Redis rejected the permissions of a host, which need Redis 7 or later: {error}"
    raise NoRightsError(f"{problem}. See MESHBOARD_REDIS_ACCESS in docs/explanation/host-security.md")


KEY = "meshboard:controller"
LASTS_S = 30  # without a turn of the controller that has it
PATIENCE_S = 1.0  # each turn of a controller asks, also of a Redis that stands still
OTHER_BOARD_MESSAGE = "The controller of another board uses this Redis"
OTHER_BOARD_ADVICE = "Use one Redis per board (MESHBOARD_REDIS_URL)."


class RedisClaim:
    """By which a controller has its Redis; made once a controller."""

    def __init__(self) -> None:
        self._client = _client()

    def hold(self, ours: str, before: str) -> str:
        """Take it, from the one of this board that had it before, or keep it; else another board's that has it.

        Raises what Redis did.
        """
        if self._client.set(KEY, ours, nx=True, ex=LASTS_S):
            return ""
        found = _holder(self._client)
        if found not in ("", ours, before):
            return found
        self._client.set(KEY, ours, ex=LASTS_S)
        return ""

    def release(self, ours: str) -> None:
        """Let another board's controller start at once."""
        if _holder(self._client) == ours:
            self._client.delete(KEY)

    def close(self) -> None:
        self._client.close()


def find_other_board() -> str:
    """The controller of another board that works on our Redis; empty where none does. Raises what Redis did."""
    with _client() as client:
        found = _holder(client)
    return "" if not found or Lease.objects.filter(holder=found).exists() else found


def _client() -> redis.Redis:
    client = connect_once(PATIENCE_S)
    if settings.REDIS_ACCESS != "shared":  # hosts' users are of the whole server, whichever database of it we use
        client.connection_pool.connection_kwargs["db"] = 0
    return client


def _holder(client: redis.Redis) -> str:
    found: Any = client.get(KEY)
    return (found or b"").decode(errors="replace")
