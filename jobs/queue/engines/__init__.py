"""Who runs a job: an engine places, starts, observes and cancels attempts."""

from __future__ import annotations

import redis

from jobs.queue.engines.base import Engine
from jobs.queue.engines.hosts import Hosts
from jobs.queue.engines.slurm.engine import SlurmEngine
from jobs.queue.engines.slurm.site import configured
from jobs.queue.inbound.silence import Listening


def engines(client: redis.Redis, ears: Listening) -> list[Engine]:
    """Those that this board has."""
    found: list[Engine] = [Hosts(client, ears)]
    if (site := configured()) is not None:
        found.append(SlurmEngine(site))
    return found
