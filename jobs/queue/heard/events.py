"""Reads the events stream: each message is taken in by itself, and one that cannot be stops none behind it."""

from __future__ import annotations

from typing import Any

import redis

from contracts.codec import BadMessageError, decode_event
from contracts.names import EVENTS_STREAM
from jobs.hosts.keys import check_sender
from jobs.models import Cursor
from jobs.queue.heard.deadletters import bury, passes
from jobs.queue.heard.hearing import hear

CURSOR = "events"
START = "0-0"
CHUNK = 32  # messages read at once: at most 8 MiB each
SET_ASIDE = f"{EVENTS_STREAM}:unusable"
SET_ASIDE_S = 24 * 3600
LAST_MILLISECONDS = 2**53  # of an id: no clock says so, and the very last id leaves none to add or to read from


def drain(client: redis.Redis) -> int:
    """Take in every event since the last one; returns how many. Taking one in twice changes nothing."""
    if not _is_stream(client):
        _set_aside(client, START, f"the key {EVENTS_STREAM} holds no stream")
    position, replayed_to = _resume(client)
    done = 0
    while _usable(position) and (entries := _read(client, position)):
        for entry, fields in entries:
            position = entry.decode()
            _take_in(position, fields, replayed=order_of(position) <= order_of(replayed_to))
        # After each chunk, so that a crash repeats little.
        Cursor.objects.filter(name=CURSOR).update(position=position)
        done += len(entries)
    if done:
        # What was taken in is never read again. Nodes of the stream go as a whole: the newest few entries stay.
        client.xtrim(EVENTS_STREAM, minid=position, approximate=True)
    # Only now: what was added before the id that spoils the stream has been heard.
    last = _last_id(client)
    if not _usable(last):
        _set_aside(client, last, f"the stream's last id {last} is beyond {LAST_MILLISECONDS} milliseconds")
    return done


def wait_for_event(client: redis.Redis, timeout_s: float) -> None:
    """Return as soon as there is an event that was not taken in, or after the timeout."""
    position = Cursor.objects.filter(name=CURSOR).values_list("position", flat=True).first() or START
    try:
        client.xread({EVENTS_STREAM: position}, count=1, block=max(1, int(timeout_s * 1000)))
    except redis.ResponseError:
        if _is_stream(client):
            raise


def order_of(entry: str) -> tuple[int, int]:
    """A stream id as numbers that compare as the stream does."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


def _resume(client: redis.Redis) -> tuple[str, str]:
    """Where to read on; and up to where what is read may have been heard before.

    A stream that ends before our position is another one: Redis was emptied, restored from an older dump, or its
    clock was set back. All of it is read again.
    """
    cursor, _ = Cursor.objects.get_or_create(name=CURSOR)
    last = _last_id(client)
    if order_of(last) < order_of(cursor.position):
        return START, last
    return cursor.position, START


def _is_stream(client: redis.Redis) -> bool:
    """Whether events can be added: to a stream, or to none yet."""
    return client.type(EVENTS_STREAM) in (b"stream", b"none")


def _usable(entry: str) -> bool:
    return order_of(entry)[0] < LAST_MILLISECONDS


def _set_aside(client: redis.Redis, entry: str, problem: str) -> None:
    """Put what nobody can add to out of the hosts' way, for staff to look at; the next event starts a new stream."""
    with client.pipeline(transaction=True) as pipe:
        pipe.rename(EVENTS_STREAM, SET_ASIDE)
        pipe.expire(SET_ASIDE, SET_ASIDE_S)
        pipe.execute()
    Cursor.objects.filter(name=CURSOR).update(position=START)
    bury(entry, b"", BadMessageError(f"{problem}: set aside as {SET_ASIDE} for a day"))


def _last_id(client: redis.Redis) -> str:
    if not client.exists(EVENTS_STREAM):
        return START
    told: Any = client.xinfo_stream(EVENTS_STREAM)
    last: str = told["last-generated-id"].decode()
    return last


def _read(client: redis.Redis, position: str) -> list[Any]:
    entries: Any = client.xrange(EVENTS_STREAM, min=f"({position}", count=CHUNK)
    return list(entries)


def _take_in(entry: str, fields: dict[bytes, bytes], *, replayed: bool) -> None:
    body = fields.get(b"b", b"")
    try:
        event = decode_event(body)
        check_sender(event["host"], body, fields.get(b"s", b""))
        hear(event, entry, replayed=replayed)
    except Exception as error:
        if passes(error):
            raise
        bury(entry, body, error)
