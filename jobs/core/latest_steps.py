"""What running attempts told of their steps last: their telemetry, read from its end back as far as it takes.

Between two steps a supervisor writes ten entries a second, so that no fixed number of the newest holds one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import redis

from contracts.telemetry.batches import select_items

MARKS = (b"\xa4kind\xa4step", b"\xa4kind\xa5phase")  # in what msgpack makes of an item that tells of a step
FIRST_ENTRIES = 40  # that are read at once, and then ever more
MOST_ENTRIES = 400
CHUNK_BYTES = 2**20  # that are read at once of a stream, about
MOST_BYTES = 16 * 2**20  # of a stream, and no further back


class Back:
    """A stream, read back until each of its ranks has told of a step."""

    def __init__(self, stream: str, num_ranks: int) -> None:
        self.stream = stream
        self.before, self.count = "+", FIRST_ENTRIES
        self.is_done = False
        self._found: list[list[dict[str, Any]]] = []  # of entries, the newest first
        self._missing, self._ranks = num_ranks, set[int]()
        self._bytes = self._entries = 0

    def take(self, entries: list[Any]) -> None:
        """The next ones back."""
        for _, fields in entries:
            batch = fields.get(b"b", b"")
            self._bytes += len(batch)
            if any(mark in batch for mark in MARKS):
                items = [item for item in select_items(batch, ("step", "phase")) if tells_steps(item)]
                self._found.append(items)
                self._ranks |= {item["rank"] for item in items}
        self._entries += len(entries)
        is_all = len(entries) < self.count or self._bytes >= MOST_BYTES
        self.is_done = is_all or len(self._ranks) >= self._missing
        if not self.is_done:
            self.before = f"({entries[-1][0].decode()}"
            self.count = max(1, min(MOST_ENTRIES, CHUNK_BYTES * self._entries // max(1, self._bytes)))

    def items(self) -> list[dict[str, Any]]:
        """The oldest first."""
        return [item for items in reversed(self._found) for item in items]


def tells_steps(item: Mapping[str, Any]) -> bool:
    """A trainer's, or a script's."""
    return item["kind"] == "step" or (item["kind"] == "phase" and ("steps" in item or "cells" in item))


def step_of(item: Mapping[str, Any]) -> int:
    """How many steps one that tells of them says were done; -1 where it is of a script that counts none."""
    return int(item["step"] if item["kind"] == "step" else item.get("steps", -1))


def newest_steps(client: redis.Redis, streams: Mapping[str, int], within_s: float) -> dict[str, list[dict[str, Any]]]:
    """Items that tell of steps, of each stream the oldest first: back until each of its ranks has told one, no further
    than `within_s` by Redis' clock. `streams`: of how many ranks each is."""
    told: Any = client.time()
    oldest = f"{max(0, told[0] - math.ceil(within_s)) * 1000}-0"
    found = [Back(stream, num_ranks) for stream, num_ranks in streams.items()]
    while reading := [one for one in found if not one.is_done]:
        with client.pipeline(transaction=False) as pipe:
            for one in reading:
                pipe.xrevrange(one.stream, max=one.before, min=oldest, count=one.count)
            answers = pipe.execute()
        for one, entries in zip(reading, answers, strict=True):
            one.take(entries)
    return {one.stream: one.items() for one in found}
