"""What an attempt sends, as it is heard: payload bytes of all its ranks, by second and axis."""

from __future__ import annotations

from typing import Any, NamedTuple

from contracts.telemetry.steps import StepItem, TrafficItem

MOST_COUNTERS = 100_000  # of an attempt: a script names its own groups


class Counter(NamedTuple):
    """Of one rank."""

    rank: int
    phase: str
    op: str
    axis: str
    group_size: int


class Sent:
    """Counters are cumulative: what one already held when it is first heard of is nobody's rate, and is left out."""

    def __init__(self) -> None:
        self._counted: dict[Counter, int] = {}
        self._untold: dict[tuple[int, str], int] = {}

    def add(self, item: TrafficItem | StepItem, second: int) -> None:
        """What a rank told in a second."""
        for cell in item["cells"]:
            counter = Counter(item["rank"], cell["phase"], cell["op"], cell["axis"], cell["group_size"])
            now, before = cell["payload_bytes"], self._counted.get(counter)
            if before is None and len(self._counted) >= MOST_COUNTERS:
                continue
            # Step items and traffic items leave a rank by two doors: an older one may come second.
            self._counted[counter] = max(now, before or 0)
            if before is not None and now > before:
                bin = (second, cell["axis"])
                self._untold[bin] = self._untold.get(bin, 0) + now - before

    def take(self) -> list[dict[str, Any]]:
        """What nobody was told of yet, oldest first."""
        told, self._untold = self._untold, {}
        return [{"second": second, "axis": axis, "bytes": told[second, axis]} for second, axis in sorted(told)]

    def forget(self) -> None:
        """Some of it was missed, or another attempt begins."""
        self._counted = {}
