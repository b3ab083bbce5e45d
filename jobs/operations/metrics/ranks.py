"""What the ranks of running jobs told last: exact counters, and how long their newest step took."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from jobs.core.redis_client import connect, read_latest_steps

log = logging.getLogger(__name__)

WINDOW_S = 120  # a rank that told of no step for longer is left out
AT_ONCE = 8  # streams of which entries are in memory at once

Stream = tuple[str, int, int]  # job, attempt, node


@dataclass
class Newest:
    """Of one rank: its newest step, and its counters of phase "step" by axis: payload bytes, calls."""

    step: int = 0
    step_s: float = 0.0
    tokens: int = 0
    loss: float | None = None
    axes: dict[str, tuple[int, int]] = field(default_factory=dict)


def newest(items: Iterable[dict[str, Any]]) -> dict[int, Newest]:
    """By rank, of items in the order in which they were told."""
    found: dict[int, Newest] = {}
    for item in items:
        if item["kind"] not in ("step", "phase") or "cells" not in item:
            continue
        rank = found.setdefault(item["rank"], Newest())
        axes: dict[str, tuple[int, int]] = {}
        for cell in item["cells"]:
            if cell["phase"] == "step":
                payload, calls = axes.get(cell["axis"], (0, 0))
                axes[cell["axis"]] = (payload + cell["payload_bytes"], calls + cell["count"])
        rank.axes = axes
        if item["kind"] == "step":
            rank.step, rank.step_s, rank.tokens = item["step"], item["step_s"], item["tokens"]
            rank.loss = item["loss"]
        else:
            rank.step = item.get("steps", rank.step)
    return found


def of_streams(streams: Mapping[Stream, int]) -> dict[Stream, dict[int, Newest]]:
    """Those that told of steps lately; none while Redis is away. `streams`: of how many ranks each is."""
    found: dict[Stream, dict[int, Newest]] = {}
    places = list(streams)
    try:
        with connect() as client:
            for first in range(0, len(places), AT_ONCE):
                some = places[first : first + AT_ONCE]
                told = read_latest_steps(client, {telemetry_stream(*one): streams[one] for one in some}, WINDOW_S)
                found |= {one: newest(told[telemetry_stream(*one)]) for one in some}
    except (RedisError, OSError) as error:
        log.warning("Metrics omit ranks: %s", error)
    return found
