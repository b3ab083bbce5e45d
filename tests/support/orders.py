"""Orders as the controller gives them."""

from __future__ import annotations

import time

from contracts.control import VERSION, LaunchOrder


def order(job: str = "job", attempt: int = 1, slots: list[int] | None = None, expires_in_s: float = 60) -> LaunchOrder:
    return LaunchOrder(
        v=VERSION,
        job=job,
        attempt=attempt,
        spec={"name": job},
        slots=slots if slots is not None else [0],
        expires=time.time() + expires_in_s,
    )
