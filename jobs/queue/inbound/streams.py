"""Read the event streams of hosts in turns, which prevents delays by a busy host.

Each event is applied alone. An event that fails becomes a dead letter and does not block later events.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import redis

from contracts.codec import BadMessageError, decode_event
from contracts.control import Event
from contracts.names import LEGACY_EVENTS_STREAM, events_stream
from jobs.core.credentials import check_sender
from jobs.models import STREAM_START, Cursor, Host, get_cursor_name
from jobs.queue.inbound.event_handlers import handle_event, is_transient, store_dead_letter

LEGACY_CURSOR = "events"  # of the stream that all hosts shared in older versions
EVENTS_PER_READ = 32  # of at most 8 MiB each
READ_S = 0.5  # per tick, after which the remaining events wait for the next tick
MAX_WAITING_EVENTS = 20_000  # equal to the limit of a host
MAX_WAITING_BYTES = 128 * 2**20
UNUSABLE_SUFFIX = ":unusable"
UNUSABLE_STREAM_S = 24 * 3600
MAX_ID_MILLISECONDS = 2**53  # no clock reaches it, and after the last possible ID nothing can be added


class Inbox(NamedTuple):
    """The event stream of a host, and how far it was read."""

    sender: str  # "" for the legacy stream of all hosts
    key: str
    cursor: str
    position: str
    again_to: str  # events up to this ID may have been applied before
    last: str = STREAM_START  # newest ID that was ever in the stream

    def check_sender(self, host: str) -> None:
        """Raise BadMessageError if a message names another host."""
        if self.sender not in ("", host):
            raise BadMessageError(f"the message names host {host}, but host {self.sender} sent it")

    def advance(self, client: redis.Redis, position: str) -> Inbox:
        """Store the position, and trim the events before it. Redis trims whole nodes of a stream."""
        Cursor.objects.filter(name=self.cursor).update(position=position)
        client.xtrim(self.key, minid=position, approximate=True)
        return self._replace(position=position)

    def is_usable(self) -> bool:
        return _is_usable_id(self.position) and _is_usable_id(self.last)

    def limit_size(self, client: redis.Redis) -> None:
        """Delete the oldest waiting events over the limits. A host itself respects them, unless it is manipulated."""
        waiting, size = client.xlen(self.key), _get_size(client, self.key)
        if waiting <= MAX_WAITING_EVENTS and size <= MAX_WAITING_BYTES:
            return
        remaining = min(MAX_WAITING_EVENTS, waiting)
        client.xtrim(self.key, maxlen=remaining, approximate=False)
        while remaining and _get_size(client, self.key) > MAX_WAITING_BYTES:
            remaining //= 2
            client.xtrim(self.key, maxlen=remaining, approximate=False)
        problem = (
            f"more than {MAX_WAITING_EVENTS:,} events or {MAX_WAITING_BYTES:,} bytes were waiting, "
            f"so the oldest {waiting - remaining:,} events were deleted"
        )
        store_dead_letter(self.position, b"", BadMessageError(problem), self.sender)

    def set_aside(self, client: redis.Redis, entry: str, problem: str) -> None:
        """Rename an unusable stream for staff to inspect. The next event starts a new stream."""
        renamed = f"{self.key}{UNUSABLE_SUFFIX}"
        with client.pipeline(transaction=True) as pipe:
            pipe.rename(self.key, renamed)
            pipe.expire(renamed, UNUSABLE_STREAM_S)
            pipe.execute()
        Cursor.objects.filter(name=self.cursor).update(position=STREAM_START, again_to=STREAM_START)
        error = BadMessageError(f"{problem}, so the stream was moved to {renamed} for one day")
        store_dead_letter(entry, b"", error, self.sender)

    def save(self) -> None:
        values = {"position": self.position, "again_to": self.again_to}
        Cursor.objects.update_or_create(name=self.cursor, defaults=values)


def _parse_id(entry: str) -> tuple[int, int]:
    """Return the ID of a stream entry as numbers that compare like the entries."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


def _is_usable_id(entry: str) -> bool:
    return _parse_id(entry)[0] < MAX_ID_MILLISECONDS


def _list_inboxes() -> list[Inbox]:
    hosts = Host.objects.present().filter(generation__gt=0).order_by("id").values_list("name", flat=True)
    streams = [(host, events_stream(host), get_cursor_name(host)) for host in hosts]
    cursors = {
        name: (position, again_to)
        for name, position, again_to in Cursor.objects.values_list("name", "position", "again_to")
    }
    return [
        Inbox(sender, key, cursor, *cursors.get(cursor, (STREAM_START, STREAM_START)))
        for sender, key, cursor in [("", LEGACY_EVENTS_STREAM, LEGACY_CURSOR), *streams]
    ]


def _list_unread(client: redis.Redis) -> list[Inbox]:
    """List inboxes with unread events or an unusable ID. Keys that are no streams are set aside."""
    inboxes = _list_inboxes()
    with client.pipeline(transaction=False) as pipe:
        for inbox in inboxes:
            pipe.xinfo_stream(inbox.key)
        infos = pipe.execute(raise_on_error=False)
    checked = (_check_stream(client, inbox, info) for inbox, info in zip(inboxes, infos, strict=True))
    return [inbox for inbox in checked if inbox]


def _check_stream(client: redis.Redis, inbox: Inbox, info: Any) -> Inbox | None:
    """Return the inbox with the newest ID of its stream, or None without unread events.

    A stream that ends before the stored position is a new one: Redis was emptied or restored, or its clock was set
    back. It is read from the start.
    """
    last = STREAM_START
    if isinstance(info, redis.ResponseError):
        kind = client.type(inbox.key)
        if kind == b"stream":
            return None  # it was created just now
        if kind != b"none":
            inbox.set_aside(client, STREAM_START, f"the Redis key {inbox.key} is not a stream")
            return None
    elif isinstance(info, Exception):
        raise info
    else:
        last = info["last-generated-id"].decode()
    if _parse_id(last) < _parse_id(inbox.position):
        inbox = inbox._replace(position=STREAM_START, again_to=last)
        inbox.save()
    if last == inbox.position and _is_usable_id(last):
        return None
    if inbox.position == STREAM_START:
        inbox.save()
    return inbox._replace(last=last)


def _get_size(client: redis.Redis, key: str) -> int:
    num_bytes: Any = client.memory_usage(key)
    return int(num_bytes or 0)


def read_events(client: redis.Redis) -> int:
    """Apply new events for a limited time, and return their number. Events can be applied repeatedly."""
    until = time.monotonic() + READ_S
    done, waiting = 0, _list_unread(client)
    while waiting:
        left: list[Inbox] = []
        for inbox in waiting:
            count, rest = _read_inbox(client, inbox)
            done += count
            left += [rest] if rest is not None else []
        if time.monotonic() > until:
            for inbox in left:
                inbox.limit_size(client)
            break
        waiting = left
    return done


def wait_for_event(client: redis.Redis, timeout_s: float) -> None:
    """Return as soon as an unread event exists, or after the timeout."""
    positions: Any = {inbox.key: inbox.position for inbox in _list_inboxes()}
    try:
        client.xread(positions, count=1, block=max(1, int(timeout_s * 1000)))
    except redis.ResponseError:
        if all(client.type(key) in (b"stream", b"none") for key in positions):
            raise


def _read_inbox(client: redis.Redis, inbox: Inbox) -> tuple[int, Inbox | None]:
    """Apply some events. Return their number, and the inbox if it has more events."""
    entries: Any = []
    if _is_usable_id(inbox.position):
        entries = client.xrange(inbox.key, min=f"({inbox.position}", count=EVENTS_PER_READ)
    is_full = len(entries) == EVENTS_PER_READ
    outdated = _find_outdated(entries, inbox) if is_full else set()
    for entry, fields in entries:
        if entry not in outdated:
            _apply(entry.decode(), fields, inbox)
    if entries:  # per read, so a crash repeats few events
        inbox = inbox.advance(client, entries[-1][0].decode())
    if is_full:
        return len(entries), inbox
    if not inbox.is_usable():  # only after the events before the unusable ID were applied
        problem = f"the last entry id {inbox.last} of the Redis stream is too large"
        inbox.set_aside(client, inbox.last, problem)
    return len(entries), None


def _find_outdated(entries: list[Any], inbox: Inbox) -> set[bytes]:
    """Return entries that a later event of the same host makes redundant, such as heartbeats after an outage.

    Ends of attempts are never redundant. Only streams with one sender are considered.
    """
    seen: set[Hashable] = set()
    found: set[bytes] = set()
    for entry, fields in reversed(entries) if inbox.sender else ():
        try:
            event = decode_event(fields.get(b"b", b""))
            inbox.check_sender(event["host"])
        except BadMessageError:
            continue  # it becomes a dead letter later
        content = _get_content_key(event)
        if content is not None and content in seen:
            found.add(entry)
        seen.add(content)
    return found


def _get_content_key(event: Event) -> Hashable:
    """Return a key that is equal for an event and the events that it replaces. None: it replaces nothing."""
    if event["kind"] == "attempt":
        report = event["report"]
        return None if report["state"] == "exited" else (report["job"], report["attempt"], report["state"])
    attempts = frozenset((report["job"], report["attempt"], report["state"]) for report in event["attempts"])
    return event["boot_id"], event["incarnation"], event["began"], attempts


def _apply(entry: str, fields: dict[bytes, bytes], inbox: Inbox) -> None:
    body = fields.get(b"b", b"")
    try:
        event = decode_event(body)
        inbox.check_sender(event["host"])
        check_sender(event["host"], body, fields.get(b"s", b""))
        handle_event(event, entry, replayed=_parse_id(entry) <= _parse_id(inbox.again_to))
    except Exception as error:
        if is_transient(error):
            raise
        store_dead_letter(entry, body, error, inbox.sender)
