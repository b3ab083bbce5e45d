"""What a host may do in Redis, as the rules of a user of its own. Needs Redis 7: rights that are of single keys.

Beyond its own queue and its own events, it reads flags of cancellation, and for its own members while they live writes
to their streams, and reads which steps are asked for and where another host lends them a checkpoint. No script, no
administration, no other key of another host's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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


class Share(NamedTuple):
    """A member of an attempt on this host."""

    job: str
    attempt: int
    node: int
    in_a_gang: bool
    lender: str = ""  # the host that sends it a checkpoint


def user_of(host: str) -> str:
    return f"{USER_PREFIX}{host}"


def rules(host: str, password_hashes: Iterable[str], shares: Iterable[Share], *, older: bool = False) -> list[str]:
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
