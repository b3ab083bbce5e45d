"""Sums of the collectives of a step."""

from __future__ import annotations

from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis, Op
from planner.facts.layout import RankGroup


class Collective(NamedTuple):
    """All calls of one op on one group.

    `payload_bytes` is the total of all `count` calls. Consecutive ranks of the group differ by `stride`.
    """

    op: Op
    axis: Axis
    group_size: int
    stride: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    payload_bytes: int


class Tally:
    """Sums calls by op, axis and group."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Op, Axis, int, int], tuple[int, int]] = {}  # (calls, bytes) by (op, axis, size, stride)

    def add(self, op: Op, axis: Axis, group: RankGroup, each_bytes: int, count: int = 1) -> None:
        """Add `count` calls of `each_bytes`."""
        self.add_all(op, axis, group, count, count * each_bytes)

    def add_all(self, op: Op, axis: Axis, group: RankGroup, count: int, payload_bytes: int) -> None:
        """Add `count` calls with `payload_bytes` in total. A group of one rank sends nothing."""
        if count == 0 or group.size == 1:
            return
        key = op, axis, group.size, group.stride
        calls, num_bytes = self._sums.get(key, (0, 0))
        self._sums[key] = calls + count, num_bytes + payload_bytes

    def rows(self) -> list[Collective]:
        return [Collective(*key, *self._sums[key]) for key in sorted(self._sums)]
