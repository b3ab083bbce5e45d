"""A whole log as a stream of bytes, of which one part at a time is held."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from asgiref.sync import sync_to_async

from contracts.logs import LogFile, LogPart
from jobs.logs.ask import ask
from jobs.logs.places import Place

AT_ONCE = 8  # parts that a process holds or waits for
PATIENCE_S = 20.0  # for one of these


class BusyError(Exception):
    """Too many logs are fetched at once."""


class Begun(NamedTuple):
    """A file of a log, with its first part."""

    file: LogFile
    part: LogPart


_slots = threading.BoundedSemaphore(AT_ONCE)


def begin(place: Place, files: tuple[LogFile, ...], offset: int = 0) -> list[Begun]:
    """The first part of each file, from a byte on: what goes wrong at once can still be refused. It blocks.

    Raises:
        NoLogError, BusyError, redis.RedisError, kombu.exceptions.OperationalError.
    """
    return [Begun(file, _part(place, file, offset)) for file in files]


def num_bytes(begun: list[Begun]) -> int:
    """About how many will be told: a log that is written goes on growing, a hole is not told."""
    return sum(one.part["kept"] for one in begun)


async def first_bytes(told: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    """At most so many of them."""
    async for part in told:
        yield part[:most]
        most -= len(part)
        if most <= 0:
            return


async def parts(place: Place, begun: list[Begun]) -> AsyncIterator[bytes]:
    """All that the files held when they were begun, one after the other; of several with words in them, each under
    its name. Raises as `begin` does, with what was told so far not being all."""
    headed = sum(one.part["size"] > 0 for one in begun) > 1
    for one in begun:
        if headed and one.part["size"]:
            yield f"==> {one.file} <==\n".encode()
        part, size = one.part, one.part["size"]
        while part["data"]:
            yield part["data"]
            if part["next"] >= size:
                break
            part = await sync_to_async(_part, thread_sensitive=False)(place, one.file, part["next"])


def _part(place: Place, file: LogFile, offset: int) -> LogPart:
    with _slot():
        return ask(place, file, offset)


@contextmanager
def _slot() -> Iterator[None]:
    if not _slots.acquire(timeout=PATIENCE_S):
        raise BusyError(f"{AT_ONCE} logs are fetched at once already; try again in a moment")
    try:
        yield
    finally:
        _slots.release()
