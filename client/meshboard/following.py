"""A rank's log as it grows, from what the recorder keeps: a few seconds late."""

from __future__ import annotations

import time
from collections.abc import Iterator

from meshboard import api
from meshboard.errors import RefusedError
from meshboard.job import Job

LAST_WORDS_S = 15.0  # after a job's end, until what it said last is kept


class Log:
    """Remembers how far a rank's log was told. A job that is queued again goes on with its next attempt."""

    def __init__(self, board: api.Client, job_id: str, rank: int) -> None:
        self._board, self._job_id, self._rank = board, job_id, rank
        self._attempt, self._next, self._since = 0, 0, 0.0

    def new(self, job: Job) -> list[str]:
        """Lines that were not told before. Raises RefusedError, AwayError."""
        if job.attempt != self._attempt:
            self._attempt, self._next, self._since = job.attempt, 0, 0.0
        found = []
        for moment, first, lines, skipped in self._kept():
            if skipped and first > self._next:
                found.append(f"[{skipped} lines are not kept here]")
            found += lines[max(0, self._next - first) :]
            self._next, self._since = max(self._next, first + len(lines)), moment
        return found

    def rest(self) -> Iterator[str]:
        """Lines until the job has ended and all of it is told. Raises RefusedError, AwayError."""
        ended = None
        while True:
            job = self._board.job(self._job_id)
            whole = job.finished and self._is_whole(job.attempt)
            yield from self.new(job)
            if job.finished:
                ended = ended or time.monotonic()
                if whole or time.monotonic() - ended > LAST_WORDS_S:
                    return
            time.sleep(api.POLL_S)

    def _is_whole(self, attempt: int) -> bool:
        return any(kept["attempt"] == attempt and kept["ended"] for kept in self._board.kept(self._job_id))

    def _kept(self) -> list[tuple[float, int, list[str], int]]:
        """Time, number of the first line, lines and how many are missing before them, oldest first."""
        asked = {"attempt": self._attempt, "ranks": self._rank, "from": self._since}
        try:
            found = self._board.table(self._job_id, "logs", **asked)
        except RefusedError as error:
            if error.status == 404:  # nothing is kept of it yet
                return []
            raise
        return sorted(zip(found["time"], found["first"], found["lines"], found["skipped"], strict=True))
