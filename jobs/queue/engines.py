"""Define engines: places where jobs run."""

from __future__ import annotations

from typing import Protocol

import redis

from jobs.queue.inbound.reconcile import EventReception, reconcile
from jobs.queue.orders import deliver
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import get_site


class Engine(Protocol):
    """Run the jobs that select this engine with `Job.engine`.

    Each method is one short pass over all these jobs, so slow work needs a thread. A pass continues what a killed
    controller left incomplete. An attempt starts only once.
    """

    name: str

    def observe(self) -> None:
        """Compare what runs with what should run, and store changes."""

    def place(self) -> None:
        """Create attempts of queued jobs, or store why they wait."""

    def start(self) -> None:
        """Send new attempts to where they run."""

    def cancel(self) -> None:
        """Send requests to end attempts."""

    def close(self) -> None:
        """Prepare for the end of the controller. Jobs continue to run."""


class HostEngine:
    """Run jobs on connected hosts, with orders through Redis."""

    name = "hosts"

    def __init__(self, client: redis.Redis, reception: EventReception) -> None:
        self._client, self._reception = client, reception

    def observe(self) -> None:
        reconcile(self._client, self._reception.since, self._reception.explain_gap())

    def place(self) -> None:
        schedule(self._reception.explain_gap())

    def start(self) -> None:
        deliver(self._client)

    def cancel(self) -> None:
        """Do nothing, because `observe` sets the cancel flags."""

    def close(self) -> None:
        """Do nothing, because no work runs in this process."""


def create_engines(client: redis.Redis, reception: EventReception) -> list[Engine]:
    """Create the configured engines."""
    site = get_site()
    return [HostEngine(client, reception), *([SlurmEngine(site)] if site else [])]
