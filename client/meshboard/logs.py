"""Lines of a rank's log while the job runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshboard.client import Client
from meshboard.errors import RefusedError
from meshboard.job import Job

GAP = "[log lines are missing here, because the board dropped them]"


def follow_lines(board: Client, job_id: str, rank: int) -> Iterator[str]:
    """Yield the log lines of a rank until the job ends, over all attempts from the current attempt on.

    For an ended job, yields the complete log.

    Raises:
        RefusedError, AwayError
    """
    job = board.job(job_id)
    yield from _read_lines(board, job_id, rank) if job.finished else _follow_job(board, job, rank)


def follow_attempt(board: Client, job_id: str, rank: int, attempt: int) -> Iterator[str]:
    """Yield the log lines of one attempt until it ends, each line once.

    Raises:
        RefusedError, AwayError
    """
    next_line = 0
    for event in board.follow_log(job_id, rank, attempt=attempt):
        if event.name == "gap":
            yield GAP
        if event.name != "log":
            continue
        first, lines = event.data["first"], event.data["lines"]
        if event.data["skipped"] and first > next_line:
            yield f"[{event.data['skipped']} log lines are missing here, because they are not stored]"
        yield from lines[max(0, next_line - first) :]
        next_line = max(next_line, first + len(lines))


def _follow_job(board: Client, job: Job, rank: int) -> Iterator[str]:
    last_attempt = job.attempt - 1  # the last attempt whose log is complete
    while not job.finished:
        yield from _read_attempts(board, job.id, rank, range(last_attempt + 1, job.attempt))
        last_attempt = job.attempt - 1
        try:
            yield from follow_attempt(board, job.id, rank, job.attempt)
            last_attempt = job.attempt
        except RefusedError as error:
            if error.status != 409:  # 409: the attempt has no host yet
                raise
        job = board.wait_for(job.id, "started")
    yield from _read_attempts(board, job.id, rank, range(last_attempt + 1, job.attempt + 1))


def _read_attempts(board: Client, job_id: str, rank: int, attempts: Iterable[int]) -> Iterator[str]:
    for attempt in attempts:
        try:
            yield from _read_lines(board, job_id, rank, attempt)
        except RefusedError as error:
            if error.status != 409:  # 409: the attempt ended before it had a host
                raise


def _read_lines(board: Client, job_id: str, rank: int, attempt: int | None = None) -> Iterator[str]:
    return split_lines(board.log(job_id, rank, attempt=attempt))


def split_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines in parts of a log."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)
    if rest:
        yield rest.decode(errors="replace")
