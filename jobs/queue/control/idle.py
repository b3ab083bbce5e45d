"""Runs that take no step for longer than they may: read from their telemetry."""

from __future__ import annotations

import time

import redis

from contracts.names import telemetry_stream
from contracts.telemetry.picked import picked_of
from jobs.models import Job, Status
from jobs.queue.control import stops

NEWEST_ENTRIES = 10
LOOKED_EVERY_S = 5.0

Key = tuple[str, int]  # job, attempt


class Idle:
    """Since when each watched run stands at its step, by this process' own clock: a new controller counts anew."""

    def __init__(self) -> None:
        self._stood: dict[Key, tuple[int, float]] = {}
        self._looked = -LOOKED_EVERY_S

    def end(self, client: redis.Redis) -> int:
        """Tell those to end that stood too long; returns how many."""
        now = time.monotonic()
        if now - self._looked < LOOKED_EVERY_S:
            return 0
        self._looked = now
        rows = Job.objects.filter(status=Status.RUNNING, idle_limit_s__isnull=False)
        limits = {(id, attempt): s for id, attempt, s in rows.values_list("id", "attempt", "idle_limit_s") if s}
        steps = _newest_steps(client, list(limits))
        before, self._stood = self._stood, {}
        ended = 0
        for key, limit_s in limits.items():
            step, since = before.get(key, (-1, now))
            if steps[key] > step:
                step, since = steps[key], now
            self._stood[key] = step, since
            if now - since >= limit_s:
                reason = f"no step for {limit_s} s (run.idle_limit_s); {max(step, 0)} were done"
                ended += stops.stop(*key, "idle", reason)
        return ended


def _newest_steps(client: redis.Redis, keys: list[Key]) -> dict[Key, int]:
    """The newest step told of; -1 where none is among the newest entries."""
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.xrevrange(telemetry_stream(*key), count=NEWEST_ENTRIES)
        answers = pipe.execute()
    found = {}
    for key, entries in zip(keys, answers, strict=True):
        found[key] = max((item["step"] for item in picked_of(entries, ["step"])), default=-1)
    return found
