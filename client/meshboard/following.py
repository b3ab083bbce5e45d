"""A rank's log as it grows."""

from __future__ import annotations

from collections.abc import Iterator

from meshboard.api import Client
from meshboard.errors import RefusedError

GAP = "[lines are missing here: the board had to let them go]"


def lines(board: Client, job_id: str, rank: int) -> Iterator[str]:
    """Until the job has ended; one that is queued again goes on with its next attempt. Of one that had ended before,
    its whole log.

    Raises:
        RefusedError, AwayError
    """
    job = board.job(job_id)
    if job.finished:
        yield from _whole(board, job_id, rank)
        return
    while not job.finished:
        try:
            yield from attempt_lines(board, job_id, rank, job.attempt)
        except RefusedError as error:
            if error.status != 409:  # it has no host yet
                raise
        job = board.wait_for(job_id, "started")


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
            yield f"[{event.data['skipped']} lines are not kept here]"
        yield from told[max(0, following - first) :]
        following = max(following, first + len(told))


def _whole(board: Client, job_id: str, rank: int) -> Iterator[str]:
    rest = b""
    for part in board.log(job_id, rank):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
