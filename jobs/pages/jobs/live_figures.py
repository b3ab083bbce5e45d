"""Read the progress and the traffic of running jobs from the newest seconds of their telemetry."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from contracts.telemetry.batches import select_stream_items
from jobs.core.redis_client import connect, get_completed_steps, read_latest_steps
from jobs.models import OCCUPIES_HOST, Job, Member

log = logging.getLogger(__name__)

CACHE_S = 2.0
PROGRESS_WINDOW_S = 120  # older steps do not count
TRAFFIC_WINDOW_S = 6
MAX_ENTRIES = 50  # per stream, which gets about seven per second
MAX_STREAMS = 128  # in total, one per host of a run
LOSS_FAULT = re.compile(r"loss is (\S+)")  # in the item of a step whose loss is NaN or infinite

Key = tuple[str, int]  # job, attempt
Figure = TypeVar("Figure")


class LatestStep(NamedTuple):
    """The newest step of a running job. `loss` is None if no rank reported a loss."""

    step: int
    loss: float | None


class RunningJobsCache(Generic[Figure]):
    """A figure of running jobs. A process reads it from Redis at most once per CACHE_S."""

    def __init__(self, read: Callable[[list[Key]], dict[Key, Figure | None]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._entries: dict[Key, tuple[float, Figure | None]] = {}

    def get(self, keys: list[Key]) -> dict[Key, Figure]:
        """Return the known figures. A run without recent telemetry is left out."""
        if not keys:
            return {}
        with self._lock:  # other threads wait and find the entries
            now = time.monotonic()
            self._entries = {key: entry for key, entry in self._entries.items() if now - entry[0] < CACHE_S}
            if missing := [key for key in keys if key not in self._entries]:
                self._entries |= {key: (now, figure) for key, figure in self._read(missing).items()}
            found = {key: self._entries[key][1] for key in keys}
        return {key: figure for key, figure in found.items() if figure is not None}

    def clear(self) -> None:
        self._entries.clear()


def read_progress(keys: list[Key]) -> dict[Key, LatestStep | None]:
    try:
        with connect() as client:
            items = read_latest_steps(client, {telemetry_stream(*key): 1 for key in keys}, PROGRESS_WINDOW_S)
    except (RedisError, OSError) as error:
        log.warning("Cannot read progress for the job list: %s", error)
        return dict.fromkeys(keys)
    return {key: find_progress(items[telemetry_stream(*key)]) for key in keys}


def find_progress(items: list[dict[str, Any]]) -> LatestStep | None:
    """Return the newest step of the items, and the newest loss. None if no item counts steps."""
    step = max(map(get_completed_steps, items), default=-1)
    losses = [(get_completed_steps(item), loss) for item in items if (loss := _get_loss(item)) is not None]
    return LatestStep(step, max(losses, key=lambda pair: pair[0])[1] if losses else None) if step >= 0 else None


def _get_loss(item: dict[str, Any]) -> float | None:
    """Return the loss of an item. NaN and infinite losses are words in the item."""
    if (loss := item.get("loss")) is not None:
        return float(loss)
    fault = LOSS_FAULT.match(item.get("not_finite", ""))
    return float(fault[1]) if fault and fault[1] in ("nan", "inf", "-inf") else None


def read_traffic_rates(keys: list[Key]) -> dict[Key, float | None]:
    rates: dict[Key, float | None] = dict.fromkeys(keys)
    streams = list_streams(keys)
    try:
        with connect() as client, client.pipeline(transaction=False) as pipe:
            seconds, _ = client.time()
            for job, attempt, node in streams:
                oldest = f"{(seconds - TRAFFIC_WINDOW_S) * 1000}-0"
                pipe.xrevrange(telemetry_stream(job, attempt, node), min=oldest, count=MAX_ENTRIES)
            answers = pipe.execute()
    except (RedisError, OSError) as error:
        log.warning("Cannot read live traffic for the overview: %s", error)
        return rates
    for (job, attempt, _), entries in zip(streams, answers, strict=True):
        found = compute_rate(select_stream_items(reversed(entries), ["traffic", "step"]))
        if found is not None:
            rates[job, attempt] = (rates[job, attempt] or 0.0) + found
    return rates


def list_streams(keys: list[Key]) -> list[tuple[str, int, int]]:
    """List (job, attempt, node) of every host. A run beyond the limit is left out as a whole."""
    nodes: dict[Key, list[int]] = {key: [] for key in keys}
    members = Member.objects.filter(attempt__job_id__in=[job for job, _ in keys])
    for job, attempt, node in members.values_list("attempt__job_id", "attempt__number", "node"):
        if (job, attempt) in nodes:
            nodes[job, attempt].append(node)
    found: list[tuple[str, int, int]] = []
    for (job, attempt), known in nodes.items():
        own = known or [0]
        if len(found) + len(own) <= MAX_STREAMS:
            found += [(job, attempt, node) for node in own]
    return found


def compute_rate(items: Iterable[dict[str, Any]]) -> float | None:
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
        times[rank] = (times[rank][0] if rank in times else time, time)
        for cell in item["cells"]:
            key = (rank, cell["phase"], cell["op"], cell["axis"], cell["group_size"])
            first.setdefault(key, cell["payload_bytes"])
            last[key] = cell["payload_bytes"]
    seconds = max((end - start for start, end in times.values()), default=0.0)
    return sum(last[key] - first[key] for key in first) / seconds if seconds > 0 else None


progress_cache = RunningJobsCache(read_progress)
traffic_cache = RunningJobsCache(read_traffic_rates)


def get_progress(jobs: list[Job]) -> dict[str, LatestStep]:
    """Return the progress by job, for running jobs with recent telemetry."""
    running = [(job.id, job.attempt) for job in jobs if job.status in OCCUPIES_HOST]
    return {job: progress for (job, _), progress in progress_cache.get(running).items()}
