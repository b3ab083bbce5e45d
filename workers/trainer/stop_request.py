"""Stop all ranks after the same step when the supervisor requests a save and stop.

Rank 0 looks for a file from its supervisor about once per second. It publishes in the rendezvous store whether this
step is the last, or the next step at which ranks ask again. Ranks exchange no messages, and wait only for rank 0, which
has finished the same step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # documented, not declared

from workers.rank_environment import get_group_timeout

POLL_INTERVAL_S = 1.0
MAX_STEPS_BETWEEN_POLLS = 100_000  # between two polls
LAST = "last"


class StopRequest:
    """Return whether a step is the last. Each rank calls this with the steps done after every step."""

    def __init__(self, file: Path, rank: int, world: int) -> None:
        self._file, self._rank, self._world = file, rank, world
        self._store: Store | None = None
        self._next, self._polled_at_s = 0, time.monotonic()
        self._done = 0  # steps at the last poll

    def __call__(self, step: int) -> bool:
        if step < self._next:
            return False
        answer = self._poll_file(step) if self._rank == 0 else self._wait_for_rank_0(step)
        if answer == LAST:
            return True
        self._next = int(answer)
        return False

    def _poll_file(self, step: int) -> str:
        now = time.monotonic()
        step_s = (now - self._polled_at_s) / (step - self._done) if self._done else POLL_INTERVAL_S
        before, self._polled_at_s, self._done = self._done, now, step
        ahead = min(MAX_STEPS_BETWEEN_POLLS, max(1, round(POLL_INTERVAL_S / max(step_s, 1e-6))))
        answer = LAST if self._file.exists() else str(step + ahead)
        if self._world > 1:
            self._get_store().set(str(step), answer)
            self._get_store().delete_key(str(before))  # All ranks have finished a later step, so all have read the key.
        return answer

    def _wait_for_rank_0(self, step: int) -> str:
        told: bytes = self._get_store().get(str(step))
        return told.decode()

    def _get_store(self) -> Store:
        """Connect to the store with a separate client, because other threads may block on theirs."""
        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            plain = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=get_group_timeout())
            self._store = PrefixStore("asked", plain)
        return self._store
