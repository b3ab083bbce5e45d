"""Compute the current traffic of running jobs from the newest seconds of their telemetry."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from contracts.telemetry.batches import select_stream_items
from jobs.core.redis_connection import connect
from jobs.models import Member
from jobs.pages.jobs.progress import Key, OfRunning

log = logging.getLogger(__name__)

WINDOW_S = 6
MOST_ENTRIES = 50  # per stream, which gets about seven per second
MOST_STREAMS = 128  # in total, one per host of a run


def rate(items: Iterable[dict[str, Any]]) -> float | None:
    """Return bytes per second over the items, oldest first. None if no rank has two items.

    Counters are cumulative, so the first value of each counter is subtracted.
    """
    first: dict[tuple[Any, ...], int] = {}
    last: dict[tuple[Any, ...], int] = {}
    times: dict[int, tuple[float, float]] = {}
    for item in items:
        if item["kind"] not in ("traffic", "step"):
            continue
        rank, time = item["rank"], item["time"]
        begun, _ = times.get(rank, (time, time))
        times[rank] = (begun, time)
        for cell in item["cells"]:
            key = (rank, cell["phase"], cell["op"], cell["axis"], cell["group_size"])
            first.setdefault(key, cell["payload_bytes"])
            last[key] = cell["payload_bytes"]
    lasted = max((end - begun for begun, end in times.values()), default=0.0)
    return sum(last[key] - first[key] for key in first) / lasted if lasted > 0 else None


def _read(keys: list[Key]) -> dict[Key, float | None]:
    rates: dict[Key, float | None] = dict.fromkeys(keys)
    streams = _streams(keys)
    try:
        with connect() as client, client.pipeline(transaction=False) as pipe:
            seconds, _ = client.time()
            for job, attempt, node in streams:
                oldest = f"{(seconds - WINDOW_S) * 1000}-0"
                pipe.xrevrange(telemetry_stream(job, attempt, node), min=oldest, count=MOST_ENTRIES)
            answers = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("Cannot read live traffic for the overview: %s", error)
        return rates
    for (job, attempt, _), entries in zip(streams, answers, strict=True):
        found = rate(select_stream_items(reversed(entries), ["traffic", "step"]))
        if found is not None:
            rates[job, attempt] = (rates[job, attempt] or 0.0) + found
    return rates


def _streams(keys: list[Key]) -> list[tuple[str, int, int]]:
    """List (job, attempt, node) of every host. A run beyond the limit is left out as a whole."""
    nodes: dict[Key, list[int]] = {key: [] for key in keys}
    members = Member.objects.filter(attempt__job_id__in=[job for job, _ in keys])
    for job, attempt, node in members.values_list("attempt__job_id", "attempt__number", "node"):
        if (job, attempt) in nodes:
            nodes[job, attempt].append(node)
    found: list[tuple[str, int, int]] = []
    for (job, attempt), known in nodes.items():
        own = known or [0]
        if len(found) + len(own) <= MOST_STREAMS:
            found += [(job, attempt, node) for node in own]
    return found


_now = OfRunning(_read)


def rates_of(keys: list[Key]) -> dict[Key, float]:
    """Return payload bytes per second over all ranks, by job and attempt."""
    return _now.of(keys) if keys else {}
