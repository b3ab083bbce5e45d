"""Keeps Redis' users in step with the hosts there are: a Redis that came back empty knows none of them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import redis
from django.conf import settings
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from contracts.names import events_stream
from jobs.core.sealed_values import password_hash, redis_passwords
from jobs.models import NOTHING_READ, Cursor, Host, Member, cursor_of
from jobs.queue.hosts.claim import ADVICE, WORDS, another_board
from jobs.queue.hosts.rights import USER_PREFIX, Share, rules, user_of

PROBE = "meshboard-probe"
FAREWELL = timedelta(minutes=10)  # after its end a member may still say the rest


class NoRightsError(Exception):
    """Redis does not let us make users, or is another board's; says what to do."""


class Access:
    """A stage of the controller; remembers what it told which Redis."""

    def __init__(self) -> None:
        self._run = ""
        self._told: dict[str, list[str]] = {}

    def keep(self, client: redis.Redis) -> int:
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
        wanted = wanted_rules()
        changed = {user: told for user, told in wanted.items() if user not in there or self._told.get(user) != told}
        gone = there - set(wanted)
        for user, told in changed.items():
            _command(client, "SETUSER", user, *told)
            self._told[user] = told
        if gone:
            _command(client, "DELUSER", *gone)
        self._told = {user: told for user, told in self._told.items() if user in wanted}
        return len(changed) + len(gone)


def admit(client: redis.Redis, host: Host) -> None:
    """Give one host its user now. Raises NoRightsError, redis.RedisError."""
    _refuse_on_anothers()
    if settings.REDIS_ACCESS != "shared":
        for user, told in wanted_rules(Host.objects.filter(pk=host.pk)).items():
            _command(client, "SETUSER", user, *told)


def dismiss(client: redis.Redis, host: Host) -> None:
    """Take a host's user away, its connections and what it said last. Raises NoRightsError, redis.RedisError."""
    _refuse_on_anothers()
    if settings.REDIS_ACCESS != "shared":
        _command(client, "DELUSER", user_of(host.name))
    client.delete(events_stream(host.name))


def probe(client: redis.Redis) -> None:
    """Whether hosts could be given users: one is made, and taken away. Raises NoRightsError, redis.RedisError."""
    rights = rules("probe", [], [])
    _command(client, "SETUSER", PROBE, *["off" if word == "on" else word for word in rights])
    _command(client, "DELUSER", PROBE)


def wanted_rules(hosts: QuerySet[Host] | None = None) -> dict[str, list[str]]:
    """Of every user that there should be, by name."""
    chosen = (Host.objects.all() if hosts is None else hosts).filter(removed=None, generation__gt=0)
    shares: dict[int, list[Share]] = {}
    for pk, *share in _live_members(chosen):
        shares.setdefault(pk, []).append(Share._make(share))
    heard = set(Cursor.objects.exclude(position=NOTHING_READ).values_list("name", flat=True))
    return {
        user_of(name): rules(
            name, _hashes(name, generation, _secrets()), shares.get(pk, []), older=cursor_of(name) not in heard
        )
        for pk, name, generation in chosen.values_list("pk", "name", "generation")
    }


def _live_members(hosts: QuerySet[Host]) -> Iterable[Any]:
    """Host, job, attempt, node, whether there are others, who lends it a checkpoint: to node 0 alone."""
    saying = Q(ended=None) | Q(ended__gt=timezone.now() - FAREWELL)
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
    return tuple(password_hash(password) for password in redis_passwords(name, generation))


def _secrets() -> tuple[str, ...]:
    return (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)


def _refuse_on_anothers() -> None:
    """There a host of this name may be another board's."""
    if other := another_board():
        raise NoRightsError(f"{WORDS} ({other}). {ADVICE}")


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
