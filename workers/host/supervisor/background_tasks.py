"""Background tasks of a supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger(__name__)

CANCEL_INTERVAL_S = 0.2
RETRY_AFTER_ERROR_S = 5.0


async def cancel_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until all have ended. A Redis call that times out in the same moment loses a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_INTERVAL_S)


async def run_periodically(work: Callable[[], Awaitable[object]], interval_s: float) -> None:
    """Repeat some work forever, also after errors."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed", work)
            await asyncio.sleep(RETRY_AFTER_ERROR_S)
        await asyncio.sleep(interval_s)
