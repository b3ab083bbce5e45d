"""How the board reads a log that lies on a host: part after part, each one an order and one answer.

A `LogOrder` travels as a JSON Celery argument on the host's own queue. Its answer is one element of the Redis list
`names.log_key`, `signing.signature` and then a msgpack `LogPart`, and is gone when nobody takes it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from contracts.fields import AttemptNumber, Count, JobId, LogRank, Number, Sentence

VERSION: Final = 1
PART_BYTES: Final = 512 * 2**10  # of a log in one answer
ANSWER_S: Final = 30.0  # how long an answer waits to be taken

LogFile = Literal["launcher", "stdout", "stderr"]
Question = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class LogOrder(TypedDict):
    """Tell what a log holds from `offset` on. It names no path: the host knows where an attempt's logs lie."""

    v: Literal[1]
    job: JobId
    attempt: AttemptNumber
    rank: LogRank  # a rank of this host; -1: its launcher, whose only file is "launcher"
    file: LogFile
    offset: Count
    question: Question
    expires: Number  # unix seconds by Redis' clock; later nobody waits for the answer


class LogPart(TypedDict):
    """At most PART_BYTES of a log. Of a hole, which the host gave back to the disk, nothing is told."""

    v: Literal[1]
    question: Question
    problem: Sentence  # why there is nothing to tell; else ""
    data: Annotated[bytes, Field(max_length=PART_BYTES)]
    next: Count  # where to go on
    size: Count  # of the file, its holes counted
    kept: Count  # of this on disk
