"""The board's own hosts: the scheduler places, the outbox carries orders through Redis, hosts tell what they run."""

from __future__ import annotations

import redis

from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.silence import Listening
from jobs.queue.order_outbox import deliver
from jobs.queue.scheduling.scheduler import schedule


class Hosts:
    """An `Engine`."""

    name = "hosts"

    def __init__(self, client: redis.Redis, ears: Listening) -> None:
        self._client, self._ears = client, ears

    def observe(self) -> None:
        """What hosts say is heard before (`jobs.queue.inbound.streams`); here it is held against the database."""
        reconcile(self._client, self._ears.since, self._ears.trouble())

    def place(self) -> None:
        schedule(self._ears.trouble())

    def start(self) -> None:
        deliver(self._client)

    def cancel(self) -> None:
        """`observe` has raised the flags: a host that came back with what was given up is told there too."""

    def close(self) -> None:
        """Nothing of it runs here."""
