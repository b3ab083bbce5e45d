"""Parts of logs, as the board asks for them: of an attempt of this host, opened as what a job could have replaced."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from contracts.codec import encode_log_part
from contracts.control import get_local_ranks
from contracts.logs import MAX_LOG_PART_BYTES, VERSION, LogOrder, LogPart
from workers.host.apart.identity import user_of
from workers.host.attempts import AttemptDir, attempt_dir
from workers.host.files import BadFileError
from workers.host.settings import HostSettings
from workers.host.supervisor.logfile import open_log, run_folder
from workers.host.supervisor.tail import LAUNCHER


class NoLogError(Exception):
    """There is nothing to tell; says why."""


class Part(NamedTuple):
    """Bytes of a file, and where its next ones are."""

    data: bytes
    next: int


def answer(order: LogOrder, settings: HostSettings) -> bytes:
    """A msgpack `LogPart`."""
    told = LogPart(v=VERSION, question=order["question"], problem="", data=b"", next=0, size=0, kept=0)
    try:
        descriptor = _open(order, settings)
    except NoLogError as error:
        return encode_log_part({**told, "problem": str(error)})
    try:
        found = os.fstat(descriptor)
        part = read_part(descriptor, order["offset"], found.st_size)
    finally:
        os.close(descriptor)
    kept = min(found.st_size, found.st_blocks * 512)
    return encode_log_part({**told, "data": part.data, "next": part.next, "size": found.st_size, "kept": kept})


def read_part(descriptor: int, offset: int, size: int) -> Part:
    """At most PART_BYTES from the first data at or after `offset`; holes are passed over, however long.

    A block that lies before a hole is filled up with zeros, which nobody wrote: they are left out. Parts begin and end
    with blocks, so that one part has them all.
    """
    try:
        start = os.lseek(descriptor, offset, os.SEEK_DATA) if offset < size else size
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        start = size  # nothing but a hole is left
    if start >= size:
        return Part(b"", size)
    end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
    data = os.pread(descriptor, min(MAX_LOG_PART_BYTES, end - start), start)
    if start + len(data) == end < size:
        return Part(data.rstrip(b"\0"), end)
    return Part(data, start + len(data) if data else size)


def _open(order: LogOrder, settings: HostSettings) -> int:
    """Raises NoLogError."""
    attempt = attempt_dir(settings.run_dir, order["job"], order["attempt"])
    try:
        launched = attempt.read_order()
    except (BadFileError, OSError):
        raise NoLogError("This host no longer stores the log of this attempt.") from None
    user = user_of(launched, settings)
    owners = frozenset({os.geteuid()} if user is None else {os.geteuid(), user.uid})
    path = _path(order, attempt, get_local_ranks(launched))
    descriptor = open_log(attempt.logs, path, owners) if path else None
    if descriptor is None:
        raise NoLogError(f"This host has no readable {order['file']} log of this attempt.")
    return descriptor


def _path(order: LogOrder, attempt: AttemptDir, ranks: range) -> tuple[str, ...] | None:
    """Below the attempt's logs; None where torchrun has made none yet."""
    if (order["rank"] == LAUNCHER) != (order["file"] == "launcher"):
        raise NoLogError(f"Rank {order['rank']} has no {order['file']} log.")
    if order["rank"] == LAUNCHER:
        return ("launcher.log",)
    if order["rank"] not in ranks:
        raise NoLogError(f"Rank {order['rank']} did not run on this host.")
    run = run_folder(attempt.logs)
    return (run, "attempt_0", str(order["rank"] - ranks.start), f"{order['file']}.log") if run else None
