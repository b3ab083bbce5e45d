"""What this process holds and takes, every few seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from contracts.telemetry.health import GaugeItem

EVERY_S = 5.0
STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Gauge:
    """Of one rank. Its first look is at once: the processors' use since it began."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._at_s, self._cpu_s = time.monotonic(), time.process_time()
        self._due_s = 0.0

    def look(self) -> GaugeItem | None:
        """None until it is time again."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + EVERY_S
        item = GaugeItem(kind="gauge", rank=self._rank, time=time.time())
        cpu_s = time.process_time()
        if now_s > self._at_s:
            item["cpu"] = (cpu_s - self._cpu_s) / (now_s - self._at_s)
        self._at_s, self._cpu_s = now_s, cpu_s
        item["resident_bytes"] = int(STATM.read_text().split()[1]) * PAGE_BYTES
        if torch.cuda.is_initialized():
            # On all devices: a new thread's current one is the first, whichever the training computes on.
            devices = range(torch.cuda.device_count())
            item["allocated_bytes"] = sum(map(torch.cuda.memory_allocated, devices))
            item["reserved_bytes"] = sum(map(torch.cuda.memory_reserved, devices))
        return item
