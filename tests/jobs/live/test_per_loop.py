"""Share one object per event loop."""

from __future__ import annotations

import asyncio

from jobs.runs.live.telemetry_reader import PerLoop

NUM_LOOPS = 20  # a new loop often reuses the id() of the previous one


def test_each_loop_has_its_own_object() -> None:
    get_object = PerLoop(object)

    async def get_twice() -> tuple[object, object]:
        return get_object(), get_object()

    found = [asyncio.run(get_twice()) for _ in range(NUM_LOOPS)]
    assert all(first is second for first, second in found)
    assert len({id(first) for first, _ in found}) == NUM_LOOPS
