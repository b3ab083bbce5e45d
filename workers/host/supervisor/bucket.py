"""A token bucket in bytes: so many a second for long, and a burst of what was not used."""

from __future__ import annotations

import asyncio
import time


class Bucket:
    """`rate` bytes a second, at most `burst` saved up; it starts full."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._filled = burst, time.monotonic()

    def level(self) -> int:
        """Bytes that may be spent now."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
        return max(0, int(self._tokens))

    def spend(self, num_bytes: int) -> None:
        """Bytes have gone; more than there were make a debt."""
        self._tokens -= num_bytes

    async def paid(self) -> None:
        """Until there is no debt."""
        self.level()
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)
