"""Entries of telemetry streams for whoever keeps them all: in order, each once, and what is missing told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import redis

from contracts.names import telemetry_stream
from jobs.runs.history.store.folder import Node

STREAMS_AT_ONCE = 32
ENTRIES_AT_ONCE = 4  # of each stream: with contracts.codec.MAX_BATCH_BYTES each, 32 MiB at once


class Stream(NamedTuple):
    """A member's."""

    job: str
    attempt: int
    node: int

    @property
    def key(self) -> bytes:
        return telemetry_stream(*self).encode()


class Heard(NamedTuple):
    """An entry. `missing`: entries between it and the one before that the stream does not have any more."""

    id: str
    number: int | None
    missing: int
    batch: bytes


def new_entries(client: redis.Redis, positions: dict[Stream, Node]) -> Iterator[tuple[Stream, list[Heard]]]:
    """What came after these positions, a few entries of each stream.

    Raises:
        RedisError
    """
    streams = list(positions)
    for start in range(0, len(streams), STREAMS_AT_ONCE):
        some = {stream.key: stream for stream in streams[start : start + STREAMS_AT_ONCE]}
        asked: Any = {key: positions[stream]["after"] for key, stream in some.items()}
        found: Any = client.xread(asked, count=ENTRIES_AT_ONCE)
        for key, entries in found or []:
            stream = some[key]
            yield stream, list(_heard(entries, positions[stream]["number"]))


def known_entries(client: redis.Redis, stream: Stream, until: str) -> Iterator[bytes]:
    """Batches of a stream up to a position, as far as it still has them.

    Raises:
        RedisError
    """
    after = "-"
    while True:
        found: Any = client.xrange(stream.key, min=after, max=until, count=ENTRIES_AT_ONCE)
        yield from (fields[b"b"] for _, fields in found if b"b" in fields)
        if len(found) < ENTRIES_AT_ONCE:
            return
        after = f"({found[-1][0].decode()}"


def _heard(entries: Any, before: int | None) -> Iterator[Heard]:
    """Numbers count on from 0 whatever happens to the stream; one that was seen before comes from an older dump."""
    for entry_id, fields in entries:
        number = _number(fields)
        expected = 0 if before is None else before + 1
        if number is not None and number < expected:
            yield Heard(entry_id.decode(), before, 0, b"")
            continue
        missing = 0 if number is None else number - expected
        before = before if number is None else number
        yield Heard(entry_id.decode(), before, missing, fields.get(b"b", b""))


def _number(fields: Any) -> int | None:
    text = fields.get(b"n", b"")
    return int(text) if text.isdigit() and len(text) < 19 else None


def set_back(client: redis.Redis, positions: dict[Stream, Node]) -> list[Stream]:
    """Those whose newest entry is older than where we are: Redis came back empty or its clock was set back, and what
    comes now would never be seen. To be read from the start; numbers say what is known already.

    Raises:
        RedisError
    """
    with client.pipeline(transaction=False) as pipe:
        for stream in positions:
            pipe.xrevrange(stream.key, count=1)
        newest = pipe.execute()
    return [
        stream
        for (stream, node), entries in zip(positions.items(), newest, strict=True)
        if entries and order(entries[0][0].decode()) < order(node["after"])
    ]


def order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
