"""How far this host's clock is off the board's, measured as NTP does: never assumed."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

from contracts.telemetry.batches import ClockOffset

EXCHANGES = 8


class BoardClock:
    """The board's time as known here. Until it was measured, our own."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.within_s: float | None = None

    async def measure(self, ask: Callable[[], Awaitable[float]]) -> None:
        """Of several exchanges the quickest counts: the answer was made at some moment while it lasted.

        `ask` gives the board's time, unix seconds; what it raises is raised.
        """
        best = (math.inf, 0.0)
        for _ in range(EXCHANGES):
            sent, began = time.time(), time.monotonic()
            told = await ask()
            took = time.monotonic() - began
            best = min(best, (took, told - (sent + took / 2)))
        self.within_s, self.offset_s = best[0] / 2, best[1]

    def now(self) -> float:
        """Unix seconds by the board's clock."""
        return time.time() + self.offset_s

    def told(self) -> ClockOffset | None:
        """None until it was measured."""
        return None if self.within_s is None else ClockOffset(offset_s=self.offset_s, within_s=self.within_s)
