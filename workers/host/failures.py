"""The rank that failed first, from the files that torchrun's launcher and the ranks write.

The job's user can write these files, so nothing in them is trusted.
"""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import NamedTuple

from contracts.fields import ESCAPES, strip_control_characters
from workers.host.attempts import AttemptDir
from workers.host.files import BadFileError, read_json

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


class RankFailure(NamedTuple):
    """The rank that failed first."""

    rank: int
    exit_code: int
    signal: str | None
    message: str
    time: float | None = None  # unix seconds, by this host's clock
    lost_peer: bool = False


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
    return RankFailure(rank, exit_code, killed_by, message, _check_time(report.get("time")), lost_peer)


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
