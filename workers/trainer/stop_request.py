"""A run is asked to save and stop: all its ranks do so after the same step.

Rank 0 looks for a file that its supervisor makes. Between two steps, about once a second, it tells the others through
the store on which they met whether this step was the last, and if not after which step they ask again. So they send
nothing more beside a step, and wait for rank 0 alone, which has just ended the same step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented, not declared

from workers.rank_environment import get_group_timeout

LOOK_S = 1.0
MOST_STEPS = 100_000  # between two looks
LAST = "last"


class Asked:
    """Called with the number of steps done, by each rank after every step: whether it was the last."""

    def __init__(self, file: Path, rank: int, world: int) -> None:
        self._file, self._rank, self._world = file, rank, world
        self._store: Store | None = None
        self._next, self._since = 0, time.monotonic()
        self._done = 0  # steps at the last look

    def __call__(self, step: int) -> bool:
        if step < self._next:
            return False
        answer = self._looked(step) if self._rank == 0 else self._heard(step)
        if answer == LAST:
            return True
        self._next = int(answer)
        return False

    def _looked(self, step: int) -> str:
        now = time.monotonic()
        pace = (now - self._since) / (step - self._done) if self._done else LOOK_S
        before, self._since, self._done = self._done, now, step
        ahead = min(MOST_STEPS, max(1, round(LOOK_S / max(pace, 1e-6))))
        answer = LAST if self._file.exists() else str(step + ahead)
        if self._world > 1:
            self._shared().set(str(step), answer)
            self._shared().delete_key(str(before))  # all have ended a step since, so all have read it
        return answer

    def _heard(self, step: int) -> str:
        told: bytes = self._shared().get(str(step))
        return told.decode()

    def _shared(self) -> Store:
        """A line of our own to the store: others of this process may wait on theirs."""
        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            plain = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=get_group_timeout())
            self._store = PrefixStore("asked", plain)
        return self._store
