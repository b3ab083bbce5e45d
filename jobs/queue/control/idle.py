"""Runs that take no step for longer than they may: read from their telemetry."""

from __future__ import annotations

import time

import redis

from contracts.names import telemetry_stream
from jobs.core.latest_steps import newest_steps, step_of
from jobs.models import Job, Status
from jobs.queue.control import stops

LOOKED_EVERY_S = 5.0
OVERLAP_S = 5.0  # of two looks, whose times are not Redis'

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
        since_s, self._looked = now - self._looked + OVERLAP_S, now
        rows = Job.objects.filter(status=Status.RUNNING, idle_limit_s__isnull=False)
        limits = {(id, attempt): s for id, attempt, s in rows.values_list("id", "attempt", "idle_limit_s") if s}
        steps = _newest(client, list(limits), since_s)
        before, self._stood = self._stood, {}
        ended = 0
        for key, limit_s in limits.items():
            step, since = before.get(key, (-1, now))
            if steps[key] > step:
                step, since = steps[key], now
            self._stood[key] = step, since
            if now - since >= limit_s:
                reason = (
                    f"no step ended within the idle limit of {limit_s} s (run.idle_limit_s) after step {max(step, 0)}"
                )
                ended += stops.stop(*key, "idle", reason)
        return ended


def _newest(client: redis.Redis, keys: list[Key], since_s: float) -> dict[Key, int]:
    """The newest step told of in the last `since_s`; -1 where none was."""
    told = newest_steps(client, {telemetry_stream(*key): 1 for key in keys}, since_s)
    return {key: max(map(step_of, told[telemetry_stream(*key)]), default=-1) for key in keys}
