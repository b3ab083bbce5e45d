"""What goes on beside a run, again and again, until it is ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger(__name__)

CANCEL_S = 0.2
AFTER_ERROR_S = 5.0


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """End tasks. Again and again: a Redis call that times out as it is cancelled tells of the timeout alone."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_S)


async def steadily(work: Callable[[], Awaitable[object]], pause_s: float) -> None:
    """Again and again, whatever goes wrong in one turn."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed", work)
            await asyncio.sleep(AFTER_ERROR_S)
        await asyncio.sleep(pause_s)
