"""Reads what hosts say, of each by turns: each message is taken in by itself, and one that cannot be stops none behind
it, nor does a host that says much hold up another.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import redis

from contracts.codec import BadMessageError, decode_event
from contracts.control import Event
from jobs.core.sealed_values import check_sender
from jobs.queue.inbound import inboxes
from jobs.queue.inbound.deadletters import bury, passes
from jobs.queue.inbound.hearing import hear
from jobs.queue.inbound.inboxes import Inbox, order_of, usable

LISTENS_S = 0.5  # in a tick, beyond a chunk of each host; then those of whom more waits are heard in the next one


def drain(client: redis.Redis) -> int:
    """Take in what was said since the last time; returns how much. Taking it in twice changes nothing."""
    until = time.monotonic() + LISTENS_S
    done, waiting = 0, inboxes.with_news(client)
    while waiting:
        left: list[Inbox] = []
        for inbox in waiting:
            heard, rest = _hear_some(client, inbox)
            done += heard
            left += [rest] if rest is not None else []
        if time.monotonic() > until:
            for inbox in left:
                inbox.cut(client)
            break
        waiting = left
    return done


def wait_for_event(client: redis.Redis, timeout_s: float) -> None:
    """Return as soon as there is an event that was not taken in, or after the timeout."""
    positions: Any = {inbox.key: inbox.position for inbox in inboxes.known()}
    try:
        client.xread(positions, count=1, block=max(1, int(timeout_s * 1000)))
    except redis.ResponseError:
        if not inboxes.holds_no_stream(client, positions):
            raise


def _hear_some(client: redis.Redis, inbox: Inbox) -> tuple[int, Inbox | None]:
    """Take in a chunk; returns how many that were, and the inbox where more waits in it."""
    entries = inbox.read(client) if usable(inbox.position) else []
    outdated = _outdated(entries, inbox) if len(entries) == inboxes.CHUNK else set()
    for entry, fields in entries:
        if entry not in outdated:
            _take_in(entry.decode(), fields, inbox)
    if entries:  # after each chunk, so that a crash repeats little
        inbox = inbox.at(client, entries[-1][0].decode())
    if len(entries) == inboxes.CHUNK:
        return len(entries), inbox
    if not inbox.is_usable():  # only now: what was added before the id that spoils the stream has been heard
        problem = f"the last entry id {inbox.last} of the Redis stream is too large"
        inbox.set_aside(client, inbox.last, problem)
    return len(entries), None


def _outdated(entries: list[Any], inbox: Inbox) -> set[bytes]:
    """What the same host says anew further on: where much waits, as after a controller was away, most is that.

    Only of what nobody else can have added; and an end is taken in whenever it is told.
    """
    told: set[Hashable] = set()
    found: set[bytes] = set()
    for entry, fields in reversed(entries) if inbox.sender else ():
        try:
            event = decode_event(fields.get(b"b", b""))
            inbox.check_sender(event["host"])
        except BadMessageError:
            continue  # a dead letter, at its turn
        news = _news(event)
        if news is not None and news in told:
            found.add(entry)
        told.add(news)
    return found


def _news(event: Event) -> Hashable:
    """The same of two events of which the later one makes the earlier one needless; None of what never is."""
    if event["kind"] == "attempt":
        report = event["report"]
        return None if report["state"] == "exited" else (report["job"], report["attempt"], report["state"])
    attempts = frozenset((report["job"], report["attempt"], report["state"]) for report in event["attempts"])
    return event["boot_id"], event["incarnation"], event["began"], attempts


def _take_in(entry: str, fields: dict[bytes, bytes], inbox: Inbox) -> None:
    body = fields.get(b"b", b"")
    try:
        event = decode_event(body)
        inbox.check_sender(event["host"])
        check_sender(event["host"], body, fields.get(b"s", b""))
        hear(event, entry, replayed=order_of(entry) <= order_of(inbox.again_to))
    except Exception as error:
        if passes(error):
            raise
        bury(entry, body, error, inbox.sender)
