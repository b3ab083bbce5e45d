"""One stream of events: how far it was read, what is new in it, and what is done where it is none.

Reads what hosts say, of each by turns: each message is taken in by itself, and one that cannot be stops none behind
it, nor does a host that says much hold up another.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import redis

from contracts.codec import BadMessageError, decode_event
from contracts.control import Event
from contracts.names import LEGACY_EVENTS_STREAM, events_stream
from jobs.core.credentials import check_sender
from jobs.models import STREAM_START, Cursor, Host, get_cursor_name
from jobs.queue.inbound.event_handlers import handle_event, is_transient, store_dead_letter

OF_ALL = "events"  # cursor of the stream that all hosts once shared
EVENTS_PER_READ = 32  # messages read at once: at most 8 MiB each
MAX_WAITING_EVENTS = 20_000  # that wait: as many as a host itself keeps
MAX_WAITING_BYTES = 128 * 2**20
SET_ASIDE = ":unusable"
UNUSABLE_STREAM_S = 24 * 3600
LAST_MILLISECONDS = 2**53  # of an id: no clock says so, and the very last id leaves none to add or to read from


class Inbox(NamedTuple):
    """What `sender` says; "" of the stream that all hosts shared. `last` is the newest id that was ever in it."""

    sender: str
    key: str
    cursor: str
    position: str
    again_to: str  # what is read up to there may have been heard before
    last: str = STREAM_START

    def read(self, client: redis.Redis) -> list[Any]:
        """The next chunk of entries."""
        return list(client.xrange(self.key, min=f"({self.position}", count=EVENTS_PER_READ))  # type: ignore[arg-type]

    def check_sender(self, named: str) -> None:
        """Raises BadMessageError where a message names a host that others than it write for."""
        if self.sender not in ("", named):
            raise BadMessageError(f"the message names host {named}, but host {self.sender} sent it")

    def at(self, client: redis.Redis, position: str) -> Inbox:
        """Read up to there: never to be read again, so it is trimmed. Of a stream's nodes the whole ones go."""
        Cursor.objects.filter(name=self.cursor).update(position=position)
        client.xtrim(self.key, minid=position, approximate=True)
        return self._replace(position=position)

    def is_usable(self) -> bool:
        return usable(self.position) and usable(self.last)

    def cut(self, client: redis.Redis) -> None:
        """Keep what waits within bounds, which a host does itself where nobody tampered with it: the oldest goes."""
        waiting, size = client.xlen(self.key), _bytes(client, self.key)
        if waiting <= MAX_WAITING_EVENTS and size <= MAX_WAITING_BYTES:
            return
        kept = min(MAX_WAITING_EVENTS, waiting)
        client.xtrim(self.key, maxlen=kept, approximate=False)
        while kept and _bytes(client, self.key) > MAX_WAITING_BYTES:
            kept //= 2
            client.xtrim(self.key, maxlen=kept, approximate=False)
        problem = (
            f"more than {MAX_WAITING_EVENTS:,} events or {MAX_WAITING_BYTES:,} bytes were waiting, "
            f"so the oldest {waiting - kept:,} events were deleted"
        )
        store_dead_letter(self.position, b"", BadMessageError(problem), self.sender)

    def set_aside(self, client: redis.Redis, entry: str, problem: str) -> None:
        """Put what nobody can add to out of the way, for staff to look at; the next event starts a new stream."""
        with client.pipeline(transaction=True) as pipe:
            pipe.rename(self.key, f"{self.key}{SET_ASIDE}")
            pipe.expire(f"{self.key}{SET_ASIDE}", UNUSABLE_STREAM_S)
            pipe.execute()
        Cursor.objects.filter(name=self.cursor).update(position=STREAM_START, again_to=STREAM_START)
        store_dead_letter(
            entry,
            b"",
            BadMessageError(f"{problem}, so the stream was moved to {self.key}{SET_ASIDE} for one day"),
            self.sender,
        )


def order_of(entry: str) -> tuple[int, int]:
    """A stream id as numbers that compare as the stream does."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


def usable(entry: str) -> bool:
    return order_of(entry)[0] < LAST_MILLISECONDS


def known() -> list[Inbox]:
    """Of every host, as far as it was read; and what older versions say."""
    hosts = Host.objects.present().filter(generation__gt=0).order_by("id").values_list("name", flat=True)
    named = [
        ("", LEGACY_EVENTS_STREAM, OF_ALL),
        *((host, events_stream(host), get_cursor_name(host)) for host in hosts),
    ]
    read = {
        name: (position, again_to)
        for name, position, again_to in Cursor.objects.values_list("name", "position", "again_to")
    }
    return [Inbox(sender, key, name, *read.get(name, (STREAM_START, STREAM_START))) for sender, key, name in named]


def with_news(client: redis.Redis) -> list[Inbox]:
    """Those in which something waits that was not read, and spoilt ones; what is no stream is set aside.

    A stream that ends before our position is another one: Redis was emptied, restored from an older dump, or its clock
    was set back. All of it is read again.
    """
    inboxes = known()
    with client.pipeline(transaction=False) as pipe:
        for inbox in inboxes:
            pipe.xinfo_stream(inbox.key)
        told = pipe.execute(raise_on_error=False)
    return [
        found for inbox, standing in zip(inboxes, told, strict=True) if (found := _standing(client, inbox, standing))
    ]


def _standing(client: redis.Redis, inbox: Inbox, told: Any) -> Inbox | None:
    last = STREAM_START
    if isinstance(told, redis.ResponseError):
        kind = client.type(inbox.key)
        if kind == b"stream":
            return None  # there was none a moment ago
        if kind != b"none":
            inbox.set_aside(client, STREAM_START, f"the Redis key {inbox.key} is not a stream")
            return None
    elif isinstance(told, Exception):
        raise told
    else:
        last = told["last-generated-id"].decode()
    if order_of(last) < order_of(inbox.position):
        inbox = inbox._replace(position=STREAM_START, again_to=last)
        _remember(inbox)
    if last == inbox.position and usable(last):
        return None
    if inbox.position == STREAM_START:
        _remember(inbox)
    return inbox._replace(last=last)


def _remember(inbox: Inbox) -> None:
    told = {"position": inbox.position, "again_to": inbox.again_to}
    Cursor.objects.update_or_create(name=inbox.cursor, defaults=told)


def _bytes(client: redis.Redis, key: str) -> int:
    told: Any = client.memory_usage(key)
    return int(told or 0)


def holds_no_stream(client: redis.Redis, keys: Iterable[str]) -> bool:
    """Whether one of these keys is there and no stream."""
    return any(client.type(key) not in (b"stream", b"none") for key in keys)


LISTENS_S = 0.5  # in a tick, beyond a chunk of each host; then those of whom more waits are heard in the next one


def read_events(client: redis.Redis) -> int:
    """Take in what was said since the last time; returns how much. Taking it in twice changes nothing."""
    until = time.monotonic() + LISTENS_S
    done, waiting = 0, with_news(client)
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
    positions: Any = {inbox.key: inbox.position for inbox in known()}
    try:
        client.xread(positions, count=1, block=max(1, int(timeout_s * 1000)))
    except redis.ResponseError:
        if not holds_no_stream(client, positions):
            raise


def _hear_some(client: redis.Redis, inbox: Inbox) -> tuple[int, Inbox | None]:
    """Take in a chunk; returns how many that were, and the inbox where more waits in it."""
    entries = inbox.read(client) if usable(inbox.position) else []
    outdated = _outdated(entries, inbox) if len(entries) == EVENTS_PER_READ else set()
    for entry, fields in entries:
        if entry not in outdated:
            _take_in(entry.decode(), fields, inbox)
    if entries:  # after each chunk, so that a crash repeats little
        inbox = inbox.at(client, entries[-1][0].decode())
    if len(entries) == EVENTS_PER_READ:
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
        handle_event(event, entry, replayed=order_of(entry) <= order_of(inbox.again_to))
    except Exception as error:
        if is_transient(error):
            raise
        store_dead_letter(entry, body, error, inbox.sender)
