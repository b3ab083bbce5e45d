"""How the supervisor ends what runs beside the training."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.patience import patient
from workers.host.supervisor.tasks import cancelled


def test_a_task_that_misses_its_first_cancellation_is_ended_all_the_same() -> None:
    """As a Redis call does that times out in the same moment: once, a finished job was shown as running for ever."""
    missed = []

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        missed.append(True)
        await asyncio.Event().wait()

    async def main() -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(3600))]
        await asyncio.sleep(0)
        await cancelled(tasks)
        return tasks

    assert all(task.cancelled() for task in asyncio.run(asyncio.wait_for(main(), patient(20))))
    assert missed == [True]
