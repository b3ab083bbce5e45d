"""Fetch logs from the hosts that store them, as a stream of bytes with one part in memory at a time."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis
from asgiref.sync import sync_to_async
from django.conf import settings
from django.utils import timezone

from contracts.codec import BadMessageError, decode_log_part, validate_log_order
from contracts.logs import VERSION, LogFile, LogOrder, LogPart
from contracts.names import TASK_READ_LOG, host_queue, log_key
from contracts.security import SIGNATURE_BYTES
from contracts.terminal_text import TerminalText
from jobs.core.credentials import is_signed_by
from jobs.core.redis_client import connect
from jobs.models import EXTERNAL_ENGINE, HOST_SILENT_AFTER, Attempt, Host, Member
from jobs.queue.orders import get_producer

LAUNCHER = -1
HOSTS = "hosts"
NOT_STARTED = "The job has not started, so it has no log."


class NoLogError(Exception):
    """The log cannot be fetched. `status`: the HTTP status."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class LogLocation(NamedTuple):
    """Locate a log by its host and by its name on this host."""

    job: str
    attempt: int
    host: Host
    rank: int  # -1 for the launcher of the host
    files: tuple[LogFile, ...]


def locate_log(attempt: Attempt, rank: int) -> LogLocation:
    """Locate the log of a rank. -1 is the launcher of node 0, -2 the launcher of node 1. Raise NoLogError."""
    if attempt.job.engine != HOSTS:
        raise NoLogError(409, _explain_external_log(attempt))
    member = find_member(attempt, rank)
    host = member.host
    if host is None or host.removed is not None:
        raise NoLogError(409, f"The log is on host {member.host_name}, which was removed from the board.")
    if host.last_seen < timezone.now() - HOST_SILENT_AFTER:
        seconds = (timezone.now() - host.last_seen).total_seconds()
        raise NoLogError(503, f"The log is on host {host.name}, which has had no contact for {seconds:,.0f} s.")
    files: tuple[LogFile, ...] = ("launcher",) if rank <= LAUNCHER else ("stdout", "stderr")
    return LogLocation(attempt.job_id, attempt.number, host, max(rank, LAUNCHER), files)


def find_member(attempt: Attempt, rank: int) -> Member:
    """Return the member with the log of a rank, numbered as in `locate_log`. Raise NoLogError."""
    members = list(attempt.members.select_related("host"))
    if not members:
        raise NoLogError(409, NOT_STARTED)
    member = next((member for member in members if _has_rank(member, rank)), None)
    if member is None:
        last = max(member.first_rank + member.num_ranks for member in members) - 1
        ranks = "rank 0" if last == 0 else f"ranks 0 to {last}"
        launchers = "the launcher, -1" if len(members) == 1 else f"launchers -1 to {-len(members)}"
        raise NoLogError(404, f"Rank {rank} does not exist. This attempt has {ranks} and {launchers}.")
    return member


def _has_rank(member: Member, rank: int) -> bool:
    if rank <= LAUNCHER:
        return member.node == LAUNCHER - rank
    return member.first_rank <= rank < member.first_rank + member.num_ranks


def _explain_external_log(attempt: Attempt) -> str:
    if attempt.job.engine == EXTERNAL_ENGINE:
        where = attempt.format_hosts() or "another machine"
        return f"The job runs outside Meshboard, on {where}. The full log is stored on this machine."
    named = f"job {attempt.engine_id}" if attempt.engine_id else "this job"
    return (
        f"The full log of {named} is in the shared folder of the {attempt.job.engine} cluster, "
        "which Meshboard does not read."
    )


log = logging.getLogger(__name__)

HOST_TIMEOUT_S = 10.0


def request_log_part(place: LogLocation, file: LogFile, offset: int) -> LogPart:
    """Return the part of a log that begins at `offset`. Blocks.

    Raises:
        NoLogError: The host has no such log or does not answer.
        redis.RedisError, kombu.exceptions.OperationalError: Redis cannot be reached.
    """
    with connect() as client:
        time_parts: Any = client.time()
        now = time_parts[0] + time_parts[1] / 1e6
        order = LogOrder(
            v=VERSION,
            job=place.job,
            attempt=place.attempt,
            rank=place.rank,
            file=file,
            offset=offset,
            question=secrets.token_hex(16),
            expires=now + HOST_TIMEOUT_S,
        )
        queue = host_queue(place.host.name)
        get_producer(settings.REDIS_URL).send_task(TASK_READ_LOG, args=[validate_log_order(order)], queue=queue)
        return _wait_for_part(client, place, order["question"])


def _wait_for_part(client: redis.Redis, place: LogLocation, question: str) -> LogPart:
    host = place.host
    key, until = log_key(host.name, question), time.monotonic() + HOST_TIMEOUT_S
    while time.monotonic() < until:
        found: Any = client.blpop([key], timeout=1)
        if found is None:
            continue
        try:
            part = _verify(place, question, found[1])
        except BadMessageError as error:
            log.warning("Dropped an invalid answer to a log request from host %s: %s", host.name, error)
            continue
        if part["problem"]:
            raise NoLogError(404, f"Host {host.name} reports: {part['problem']}")
        return part
    raise NoLogError(503, f"Host {host.name} has the log, but did not answer within {HOST_TIMEOUT_S:g} s.")


def _verify(place: LogLocation, question: str, sealed: bytes) -> LogPart:
    """Verify the signature and the request of an answer. Raises BadMessageError."""
    signature, body = sealed[:SIGNATURE_BYTES], sealed[SIGNATURE_BYTES:]
    if not is_signed_by(place.host, body, signature):
        raise BadMessageError(f"the answer is not signed by host {place.host.name}")
    part = decode_log_part(body)
    if part["question"] != question:
        raise BadMessageError("the answer is for another request")
    return part


MAX_CONCURRENT_PARTS = 8  # per process
MAX_STARTS_PER_USER = 4  # at once, so that logs of a silent host do not block all threads
PART_SLOT_TIMEOUT_S = 20.0  # for a part of a running download
START_SLOT_TIMEOUT_S = 2.0  # for the first part, which blocks a thread


class TooManyDownloadsError(Exception):
    """Too many logs are fetched at once."""


class LogFileStart(NamedTuple):
    """Hold the first part of a file."""

    file: LogFile
    part: LogPart


_slots = threading.BoundedSemaphore(MAX_CONCURRENT_PARTS)
_beginning: Counter[int] = Counter()  # by user
_counting = threading.Lock()


def start_download(place: LogLocation, files: tuple[LogFile, ...], person: int, offset: int = 0) -> list[LogFileStart]:
    """Return the first part of each file. Blocks. Raise TooManyDownloadsError, or errors of `request_log_part`."""
    with _limit_starts(person):
        return [LogFileStart(file, _fetch_part(place, file, offset, START_SLOT_TIMEOUT_S)) for file in files]


def estimate_num_bytes(files: list[LogFileStart]) -> int:
    """Return about how many bytes follow. A running log grows, and holes are skipped."""
    return sum(file.part["kept"] for file in files)


async def limit_bytes(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield at most `max_bytes` bytes."""
    async for part in chunks:
        yield part[:max_bytes]
        max_bytes -= len(part)
        if max_bytes <= 0:
            return


async def stream_log(
    place: LogLocation, begun: list[LogFileStart], *, as_terminal: bool = False
) -> AsyncIterator[bytes]:
    """Yield the bytes that the files had at the start. Several non-empty files each get a header.

    Args:
        as_terminal: Yield the lines that a terminal shows, instead of the bytes as written.
    """
    has_headers = sum(file.part["size"] > 0 for file in begun) > 1
    for file in begun:
        if has_headers and file.part["size"]:
            yield f"==> {file.file} <==\n".encode()
        chunks = _stream_file(place, file)
        async for chunk in _show_as_terminal(chunks) if as_terminal else chunks:
            yield chunk


async def _stream_file(place: LogLocation, start: LogFileStart) -> AsyncIterator[bytes]:
    part, size = start.part, start.part["size"]
    while part["data"]:
        yield part["data"]
        if part["next"] >= size:
            break
        part = await sync_to_async(_fetch_part, thread_sensitive=False)(place, start.file, part["next"])


async def _show_as_terminal(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    text = TerminalText()
    convert = sync_to_async(text.feed, thread_sensitive=False)
    async for chunk in chunks:
        yield _join_lines(await convert(chunk))
    yield _join_lines(await convert(b"", final=True))


def _join_lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _fetch_part(place: LogLocation, file: LogFile, offset: int, patience_s: float = PART_SLOT_TIMEOUT_S) -> LogPart:
    with _limit_parts(patience_s):
        return request_log_part(place, file, offset)


@contextmanager
def _limit_starts(person: int) -> Iterator[None]:
    with _counting:
        if _beginning[person] >= MAX_STARTS_PER_USER:
            raise TooManyDownloadsError(
                f"You already have {MAX_STARTS_PER_USER} log downloads in progress, the maximum. Try again later."
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
def _limit_parts(patience_s: float) -> Iterator[None]:
    if not _slots.acquire(timeout=patience_s):
        raise TooManyDownloadsError(
            f"The board already has {MAX_CONCURRENT_PARTS} log downloads in progress, the maximum. Try again later."
        )
    try:
        yield
    finally:
        _slots.release()
