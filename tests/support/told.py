"""What was said of jobs that ended while a test ran, and what was left of them: the rows of `make faults`."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """`left`: processes of the job that still lived when its end was told."""

    said: str
    left: int


endings: list[Ending] = []  # of the running test


def ended(status: str, reason: str, left: int) -> None:
    endings.append(Ending(f"{status}: {reason}", left))
