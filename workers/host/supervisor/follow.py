"""Hands on what ranks write to their logs while an attempt runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from contracts.telemetry.steps import LogItem
from workers.host.supervisor.tail import LogTail

log = logging.getLogger(__name__)

LOOK_S = 0.25


async def follow(find: Callable[[], LogTail | None], add: Callable[[LogItem], None], over: asyncio.Event) -> None:
    """Hand on what is written until it is `over`, once there is a tail to follow.

    In a thread: a disk may block, and the ranks' records and the cancel flag must not wait for it.
    """
    final = False
    while not final:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await over.wait()
        final = over.is_set()
        tail = find()
        if tail is None:
            continue
        try:
            for item in await asyncio.to_thread(tail.read, final=final):
                add(item)
        except OSError as error:
            log.warning("cannot read the logs: %s", error)
