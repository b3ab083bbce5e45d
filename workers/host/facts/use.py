"""How a machine fares now."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from contracts.hosts import DiskUsage, HostUsage
from workers.host.facts.gpus import Gpus
from workers.host.settings import HostSettings

MOST_GPUS = 64


def use(gpus: Gpus, settings: HostSettings) -> HostUsage:
    """Without the clock. Cores' use is since the call before; the first tells none."""
    memory = psutil.virtual_memory()
    told = HostUsage(
        load=os.getloadavg()[0],
        memory_bytes=memory.total - memory.available,
        gpus=gpus.use()[:MOST_GPUS],
        disks=[*disk("runs", settings.run_dir), *disk("checkpoints", settings.checkpoint_root)],
    )
    if (busy := psutil.cpu_percent(None)) > 0:
        told["busy_percent"] = busy
    return told


def disk(kind: Literal["runs", "checkpoints"], folder: Path) -> list[DiskUsage]:
    """Of a folder, or of the nearest above that is there; none where that cannot be told."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        told = shutil.disk_usage(there)
    except OSError:
        return []
    return [DiskUsage(use=kind, path=str(folder)[:200], free_bytes=told.free, total_bytes=told.total)]


def clock_offset(now: Callable[[], float]) -> tuple[float, float]:
    """Our clock less that of `now`, and the seconds that asking took: the offset is known to half of them."""
    before, asked = time.time(), time.monotonic()
    theirs = now()
    took = time.monotonic() - asked
    return before + took / 2 - theirs, took
