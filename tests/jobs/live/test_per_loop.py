"""One of a thing for each event loop."""

from __future__ import annotations

import asyncio

from jobs.runs.live.per_loop import PerLoop

LOOPS = 20  # a new one mostly gets the place, and so the id(), of the one before


def test_a_loop_has_one_and_the_next_loop_another() -> None:
    own = PerLoop(object)

    async def twice() -> tuple[object, object]:
        return own(), own()

    found = [asyncio.run(twice()) for _ in range(LOOPS)]
    assert all(first is second for first, second in found)
    assert len({id(first) for first, _ in found}) == LOOPS
