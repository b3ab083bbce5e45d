"""A whole log as a stream of bytes, of which one part at a time is held."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from asgiref.sync import sync_to_async

from contracts.logs import LogFile, LogPart
from jobs.runs.logs.ask import ask
from jobs.runs.logs.places import Place

AT_ONCE = 8  # parts that a process holds or waits for
OF_ONE_PERSON = 4  # logs that begin at once, or a silent host's would have all threads that answer anybody
PATIENCE_S = 20.0  # for a part's turn, of a log that is being told
BEGIN_PATIENCE_S = 2.0  # of one that begins, while whose thread waits nobody else is answered by it


class BusyError(Exception):
    """Too many logs are fetched at once."""


class Begun(NamedTuple):
    """A file of a log, with its first part."""

    file: LogFile
    part: LogPart


_slots = threading.BoundedSemaphore(AT_ONCE)
_beginning: Counter[int] = Counter()  # by person
_counting = threading.Lock()


def begin(place: Place, files: tuple[LogFile, ...], person: int, offset: int = 0) -> list[Begun]:
    """The first part of each file, from a byte on: what goes wrong at once can still be refused. It blocks.

    Raises:
        NoLogError, BusyError, redis.RedisError, kombu.exceptions.OperationalError.
    """
    with _turn(person):
        return [Begun(file, _part(place, file, offset, BEGIN_PATIENCE_S)) for file in files]


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


def _part(place: Place, file: LogFile, offset: int, patience_s: float = PATIENCE_S) -> LogPart:
    with _slot(patience_s):
        return ask(place, file, offset)


@contextmanager
def _turn(person: int) -> Iterator[None]:
    with _counting:
        if _beginning[person] >= OF_ONE_PERSON:
            raise BusyError(
                f"You already have {OF_ONE_PERSON} log downloads in progress, the maximum. Try again later."
            )
        _beginning[person] += 1
    try:
        yield
    finally:
        with _counting:
            _beginning[person] -= 1
            if not _beginning[person]:
                del _beginning[person]


@contextmanager
def _slot(patience_s: float) -> Iterator[None]:
    if not _slots.acquire(timeout=patience_s):
        raise BusyError(f"The board already has {AT_ONCE} log downloads in progress, the maximum. Try again later.")
    try:
        yield
    finally:
        _slots.release()
