"""How a rank came to its first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from contracts.telemetry.batches import Item
from contracts.telemetry.steps import StartItem

Stage = Literal["imported", "met", "built", "first step"]


class Start:
    """Tells each stage when it is over, once."""

    def __init__(self, rank: int, send: Callable[[Item], None]) -> None:
        self._rank, self._send = rank, send
        self._over: set[Stage] = set()

    def told(self, stage: Stage) -> None:
        if stage not in self._over:
            self._over.add(stage)
            self._send(StartItem(kind="start", rank=self._rank, time=time.time(), stage=stage))
