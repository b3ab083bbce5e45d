"""Failure reports and log files of ranks.

The job's user can write and replace these files, so they are opened with distrust, and their size on disk is limited.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import signal
import stat
from pathlib import Path
from typing import NamedTuple

from contracts.codec import encode_log_part
from contracts.control import get_local_ranks
from contracts.fields import ESCAPES, strip_control_characters
from contracts.logs import MAX_LOG_PART_BYTES, VERSION, LogOrder, LogPart
from workers.disk import BadFileError, read_json
from workers.host.attempts import AttemptDir, get_attempt_dir
from workers.host.isolation import get_job_user
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

MAX_TIME = 2**40  # unix seconds
MAX_LINE_CHARS = 500
MAX_MESSAGE_CHARS = 2_000
MAX_TRACEBACK_CHARS = 8_000
SIGNAL_NAME = re.compile(r"SIG[A-Z0-9]{1,12}|signal [0-9]{1,3}")
# An error message of a rank that lost its connection to another rank. The other rank is the cause.
LOST_PEER = re.compile(
    r"(closed|reset) by peer|broken pipe|connection (was )?(closed|reset|aborted|timed out)"
    r"|no route to host|network is unreachable|timed out waiting",
    re.IGNORECASE,
)
LAUNCHER_RANK = -1  # of torchrun's own log
LAUNCHER_STDOUT = "launcher-stdout.log"  # of an external run, whose standard output and error are separate
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h
BLOCK_BYTES = 4096
HEAD_FRACTION = 4  # 1/4 of the limit stays from the start of a log, 1/2 from its end


class RankFailure(NamedTuple):
    """The rank that failed first."""

    rank: int
    exit_code: int
    signal: str | None
    message: str
    time: float | None = None  # unix seconds, by this host's clock
    lost_peer: bool = False
    pid: int | None = None


class RankError(NamedTuple):
    """The error that a rank recorded before it ended. Empty if the rank recorded none."""

    message: str = ""
    traceback: str = ""
    time: float | None = None  # unix seconds


def read_failure(attempt: AttemptDir, ranks: range) -> RankFailure | None:
    """Return the launcher's report of the first failed rank, or None if the report is missing or invalid."""
    try:
        report = read_json(attempt.failure_file)
    except (BadFileError, OSError) as error:
        log.warning("ignored the failure report of the launcher: %s", error)
        return None
    if not isinstance(report, dict):
        return None
    rank, exit_code, killed_by = report.get("rank"), report.get("exit_code"), report.get("signal")
    if not (type(rank) is int and rank in ranks and type(exit_code) is int and abs(exit_code) < 2**31):
        return None
    if killed_by is not None and not (isinstance(killed_by, str) and SIGNAL_NAME.fullmatch(killed_by)):
        return None
    message = clean_line(str(report.get("message") or ""))
    lost_peer = report.get("lost_peer") is True
    pid = report.get("pid")
    known_pid = pid if type(pid) is int and 0 < pid < 2**31 else None
    return RankFailure(rank, exit_code, killed_by, message, _check_time(report.get("time")), lost_peer, known_pid)


def read_rank_error(path: Path) -> RankError:
    """Return the error in a file that a rank wrote for torchrun (`TORCHELASTIC_ERROR_FILE`)."""
    try:
        error = read_json(path)["message"]
        if isinstance(error, str):
            return RankError(_truncate(error, MAX_MESSAGE_CHARS))
        extra = error.get("extraInfo") or {}
        time = float(extra.get("time_s") or extra["timestamp"])
        traceback = str(extra.get("py_callstack", ""))[-MAX_TRACEBACK_CHARS:]
        message = error["message"] if isinstance(error["message"], str) else json.dumps(error["message"])
        return RankError(_truncate(message, MAX_MESSAGE_CHARS), _truncate(traceback), _check_time(time))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return RankError()


def has_lost_peer(text: str) -> bool:
    """Return whether an error message says that another rank was gone."""
    return LOST_PEER.search(text) is not None


def get_signal_name(exit_code: int) -> str | None:
    """Return the name of the signal in an exit code of -N, or None for other exit codes."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


def clean_line(text: str) -> str:
    """Return one line of valid Unicode without escape sequences or NUL, of at most MAX_LINE_CHARS."""
    line = " ".join(_truncate(ESCAPES.sub("", text).replace("\0", "\ufffd")).split())
    return strip_control_characters(line)[:MAX_LINE_CHARS]


def _truncate(text: str, max_chars: int | None = None) -> str:
    """Return text that JSON, a database, and a terminal accept."""
    return text[:max_chars].replace("\0", "").encode("utf-8", "replace").decode()


def _check_time(time: object) -> float | None:
    return float(time) if isinstance(time, int | float) and 0 < time < MAX_TIME else None


_libc = ctypes.CDLL(None, use_errno=True)


class LogUnavailableError(Exception):
    """A log that cannot be read."""


class LogRange(NamedTuple):
    """Bytes of a file, and the offset of the next bytes."""

    data: bytes
    next: int


def find_run_folder(logs: Path) -> str | None:
    """Return the folder that torchrun created for its run, which is the oldest folder in `logs`."""
    with contextlib.suppress(OSError), os.scandir(logs) as entries:
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        return min(folders, key=lambda entry: entry.stat(follow_symlinks=False).st_ctime_ns).name if folders else None
    return None


def open_log(logs: Path, path: tuple[str, ...], owners: frozenset[int]) -> int | None:
    """Open logs/path for reading and writing, or return None if there is no valid log.

    A log is a regular file with one name and an owner among `owners`. Links are not followed, and FIFOs do not block.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, folder)
            for name in path[:-1]:
                folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                opened.callback(os.close, folder)
            descriptor = os.open(path[-1], os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid in owners:
            return descriptor
        os.close(descriptor)
        return None


def limit_log_size(descriptor: int, max_bytes: int) -> None:
    """Free the middle of a log on disk if it takes more than `max_bytes`. A notice replaces the start of the hole.

    The file keeps its length, so a rank continues to write at its offset.
    """
    status = os.fstat(descriptor)
    if status.st_blocks * 512 <= max_bytes:
        return
    start = max_bytes // HEAD_FRACTION // BLOCK_BYTES * BLOCK_BYTES
    end = (status.st_size - max_bytes // 2) // BLOCK_BYTES * BLOCK_BYTES
    if end - start <= BLOCK_BYTES:
        return
    if _libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(end - start)) != 0:
        os.ftruncate(descriptor, 0)  # the file system does not support holes
        start, end = 0, status.st_size
    notice = f"\n[{end - start:,} bytes were removed here: the limit of a log is {max_bytes:,} bytes]\n"
    os.pwrite(descriptor, notice.encode(), start)


def read_log_part(order: LogOrder, settings: HostSettings) -> bytes:
    """Return the part of a log that the board requests, as a msgpack `LogPart`."""
    part = LogPart(v=VERSION, question=order["question"], problem="", data=b"", next=0, size=0, kept=0)
    try:
        descriptor = _open_requested(order, settings)
    except LogUnavailableError as error:
        return encode_log_part({**part, "problem": str(error)})
    try:
        status = os.fstat(descriptor)
        found = read_range(descriptor, order["offset"], status.st_size)
    finally:
        os.close(descriptor)
    num_disk_bytes = min(status.st_size, status.st_blocks * 512)
    return encode_log_part(
        {**part, "data": found.data, "next": found.next, "size": status.st_size, "kept": num_disk_bytes}
    )


def read_range(descriptor: int, offset: int, size: int) -> LogRange:
    """Return at most MAX_LOG_PART_BYTES of the first data at or after `offset`. Holes of any length are skipped.

    The kernel fills the block before a hole with zeros, which are left out. Ranges begin and end at blocks, so all
    zeros of a block are in one range.
    """
    try:
        start = os.lseek(descriptor, offset, os.SEEK_DATA) if offset < size else size
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        start = size  # only a hole is left
    if start >= size:
        return LogRange(b"", size)
    end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
    data = os.pread(descriptor, min(MAX_LOG_PART_BYTES, end - start), start)
    if start + len(data) == end < size:
        return LogRange(data.rstrip(b"\0"), end)
    return LogRange(data, start + len(data) if data else size)


def _open_requested(order: LogOrder, settings: HostSettings) -> int:
    """Open the requested log. Raises LogUnavailableError."""
    attempt = get_attempt_dir(settings.run_dir, order["job"], order["attempt"])
    try:
        launch_order = attempt.read_order()
    except (BadFileError, OSError):
        raise LogUnavailableError("This host no longer stores the log of this attempt.") from None
    user = get_job_user(launch_order, settings)
    owners = frozenset({os.geteuid()} if user is None else {os.geteuid(), user.uid})
    path = _find_path(order, attempt, get_local_ranks(launch_order))
    descriptor = open_log(attempt.logs, path, owners) if path else None
    if descriptor is None:
        raise LogUnavailableError(f"This host has no readable {order['file']} log of this attempt.")
    return descriptor


def _find_path(order: LogOrder, attempt: AttemptDir, ranks: range) -> tuple[str, ...] | None:
    """Return a path below the attempt's logs, or None if torchrun has not created the log yet."""
    if (order["rank"] == LAUNCHER_RANK) != (order["file"] == "launcher"):
        raise LogUnavailableError(f"Rank {order['rank']} has no {order['file']} log.")
    if order["rank"] == LAUNCHER_RANK:
        return ("launcher.log",)
    if order["rank"] not in ranks:
        raise LogUnavailableError(f"Rank {order['rank']} did not run on this host.")
    run = find_run_folder(attempt.logs)
    return (run, "attempt_0", str(order["rank"] - ranks.start), f"{order['file']}.log") if run else None
