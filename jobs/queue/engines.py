"""What the controller asks of an engine. Kubernetes, say, would be one more.

The board's own hosts: the scheduler places, the outbox carries orders through Redis, hosts tell what they run.

Who runs a job: an engine places, starts, observes and cancels attempts.
"""

from __future__ import annotations

from typing import Protocol

import redis

from jobs.queue.inbound.reconcile import EventReception, reconcile
from jobs.queue.orders import deliver
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import get_site


class Engine(Protocol):
    """Runs the jobs that name it. Each call is one pass over all of them and short: what takes time goes on beside the
    controller. What a pass finds half done, by a controller that was killed anywhere, it goes on with; an attempt is
    started once however often it is called.
    """

    name: str  # `Job.engine`

    def observe(self) -> None:
        """Hold what runs against what should: the news goes into the database."""

    def place(self) -> None:
        """Begin attempts of queued jobs, or write down why they wait."""

    def start(self) -> None:
        """Hand over what was placed."""

    def cancel(self) -> None:
        """Have what is to end told so."""

    def close(self) -> None:
        """The controller stops; what runs goes on."""


class HostEngine:
    """An `Engine`."""

    name = "hosts"

    def __init__(self, client: redis.Redis, ears: EventReception) -> None:
        self._client, self._ears = client, ears

    def observe(self) -> None:
        """What hosts say is heard before (`jobs.queue.inbound.streams`); here it is held against the database."""
        reconcile(self._client, self._ears.since, self._ears.explain_gap())

    def place(self) -> None:
        schedule(self._ears.explain_gap())

    def start(self) -> None:
        deliver(self._client)

    def cancel(self) -> None:
        """`observe` has raised the flags: a host that came back with what was given up is told there too."""

    def close(self) -> None:
        """Nothing of it runs here."""


def create_engines(client: redis.Redis, ears: EventReception) -> list[Engine]:
    """Those that this board has."""
    found: list[Engine] = [HostEngine(client, ears)]
    if (site := get_site()) is not None:
        found.append(SlurmEngine(site))
    return found
