"""What running jobs send just now: payload bytes a second, from the newest seconds of their telemetry."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from contracts.telemetry.picked import picked_of
from jobs.connection import connect
from jobs.pages.jobs.progress import Key, OfRunning

log = logging.getLogger(__name__)

WINDOW_S = 6
MOST_ENTRIES = 50  # of a stream; its supervisor writes about seven a second


def rate(items: Iterable[dict[str, Any]]) -> float | None:
    """Bytes a second over the items, oldest first; None where they are no two of one rank.

    Counters are cumulative: what a counter already held when the items begin is not theirs.
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
    try:
        with connect() as client, client.pipeline(transaction=False) as pipe:
            seconds, _ = client.time()
            for job, attempt in keys:
                oldest = f"{(seconds - WINDOW_S) * 1000}-0"
                pipe.xrevrange(telemetry_stream(job, attempt), min=oldest, count=MOST_ENTRIES)
            answers = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("the overview goes without traffic: %s", error)
        return rates
    for key, entries in zip(keys, answers, strict=True):
        rates[key] = rate(picked_of(reversed(entries), ["traffic", "step"]))
    return rates


_now = OfRunning(_read)


def rates_of(keys: list[Key]) -> dict[Key, float]:
    """{(job, attempt): payload bytes a second over all ranks} of those that told of some."""
    return _now.of(keys) if keys else {}
