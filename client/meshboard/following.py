"""A rank's log as it grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshboard.api import Client
from meshboard.errors import RefusedError
from meshboard.job import Job

GAP = "[log lines are missing here, because the board dropped them]"


def lines(board: Client, job_id: str, rank: int) -> Iterator[str]:
    """Until the job has ended; one that is queued again goes on with its next attempt. Of one that had ended before,
    its whole log, and of each attempt that began and ended between two looks.

    Raises:
        RefusedError, AwayError
    """
    job = board.job(job_id)
    yield from _whole(board, job_id, rank) if job.finished else _from(board, job, rank)


def attempt_lines(board: Client, job_id: str, rank: int, attempt: int) -> Iterator[str]:
    """Of one attempt. A part that is told twice, as where the line broke, is told once.

    Raises:
        RefusedError, AwayError
    """
    following = 0
    for event in board.follow_log(job_id, rank, attempt=attempt):
        if event.name == "gap":
            yield GAP
        if event.name != "log":
            continue
        first, told = event.data["first"], event.data["lines"]
        if event.data["skipped"] and first > following:
            yield f"[{event.data['skipped']} log lines are missing here, because they are not stored]"
        yield from told[max(0, following - first) :]
        following = max(following, first + len(told))


def _from(board: Client, job: Job, rank: int) -> Iterator[str]:
    """From the attempt on that the job is at."""
    told = job.attempt - 1
    while not job.finished:
        yield from _missed(board, job.id, rank, range(told + 1, job.attempt))
        told = job.attempt - 1
        try:
            yield from attempt_lines(board, job.id, rank, job.attempt)
            told = job.attempt
        except RefusedError as error:
            if error.status != 409:  # it has no host yet
                raise
        job = board.wait_for(job.id, "started")
    yield from _missed(board, job.id, rank, range(told + 1, job.attempt + 1))


def _missed(board: Client, job_id: str, rank: int, attempts: Iterable[int]) -> Iterator[str]:
    for attempt in attempts:
        try:
            yield from _whole(board, job_id, rank, attempt)
        except RefusedError as error:
            if error.status != 409:  # it ended before it had a host
                raise


def _whole(board: Client, job_id: str, rank: int, attempt: int | None = None) -> Iterator[str]:
    rest = b""
    for part in board.log(job_id, rank, attempt=attempt):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
