"""What the ranks of running jobs told last: exact counters, and how long their newest step took."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from contracts.names import telemetry_stream
from contracts.telemetry.picked import picked_of
from jobs.connection import connect

log = logging.getLogger(__name__)

WINDOW_S = 120  # a rank that told of no step for longer is left out
MOST_ENTRIES = 40  # of a stream; its supervisor writes about seven a second, and fewer where steps are long
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


def of_streams(streams: Sequence[Stream]) -> dict[Stream, dict[int, Newest]]:
    """Those that told of steps lately; none while Redis is away."""
    found: dict[Stream, dict[int, Newest]] = {}
    try:
        with connect() as client:
            told: Any = client.time()
            oldest = f"{(told[0] - WINDOW_S) * 1000}-0"
            for first in range(0, len(streams), AT_ONCE):
                some = streams[first : first + AT_ONCE]
                with client.pipeline(transaction=False) as pipe:
                    for stream in some:
                        pipe.xrevrange(telemetry_stream(*stream), min=oldest, count=MOST_ENTRIES)
                    answers = pipe.execute()
                for stream, entries in zip(some, answers, strict=True):
                    found[stream] = newest(picked_of(reversed(entries), ["step", "phase"]))
    except (RedisError, OSError) as error:
        log.warning("metrics go without ranks: %s", error)
    return found
