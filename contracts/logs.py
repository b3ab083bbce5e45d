"""Messages that read a log on a host part by part, and the JSON format of log lines.

A `LogOrder` travels as a JSON Celery argument on the queue of the host. The answer is one element of the Redis list
`names.log_key`: a signature, then a msgpack `LogPart`. The answer expires if no process takes it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.fields import AttemptNumber, Count, JobId, LogRank, Number, Text

VERSION: Final = 1
MAX_LOG_PART_BYTES: Final = 512 * 2**10  # per answer
LOG_ANSWER_TTL_S: Final = 30.0

LogFile = Literal["launcher", "stdout", "stderr"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogRequestId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class LogOrder(TypedDict):
    """Order to return the content of a log from `offset` on.

    The order contains no path, because the host knows where the logs of an attempt are.
    """

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    rank: LogRank  # a rank of this host, or -1 for the launcher, whose only file is "launcher"
    file: LogFile
    offset: Count
    question: LogRequestId
    expires: Number  # unix seconds of the Redis clock, after which no process reads the answer


class LogPart(TypedDict):
    """At most MAX_LOG_PART_BYTES of a log, without the ranges that the host gave back to the disk."""

    v: Literal[1]
    question: LogRequestId
    problem: Text  # the reason for missing data, or ""
    data: Annotated[bytes, Field(max_length=MAX_LOG_PART_BYTES)]
    next: Count  # offset of the next part
    size: Count  # bytes of the file, with its holes
    kept: Count  # bytes of the file that are on disk


def build_json_formatter(*extra_fields: str, static: dict[str, Any] | None = None) -> dict[str, Any]:
    """Build a `logging.config` formatter that writes one JSON object per line.

    Args:
        extra_fields: Further attributes of a log record to write.
        static: Fields with the same value in each line.
    """
    return {
        "static_fields": static or {},
        "()": "pythonjsonlogger.json.JsonFormatter",
        "fmt": ("levelname", "name", "message", *extra_fields),
        "rename_fields": {"levelname": "level", "name": "logger"},
        "timestamp": True,
    }
