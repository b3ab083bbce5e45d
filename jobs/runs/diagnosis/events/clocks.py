"""Times of several hosts on one clock, and how far they can be told apart."""

from __future__ import annotations

from contracts.telemetry.batches import ClockOffset


class Clocks:
    """The board's clock over each host's, as last told. Hosts are told apart by their place in the gang."""

    def __init__(self) -> None:
        self._clocks: dict[int, ClockOffset] = {}

    def told(self, node: int, clock: ClockOffset | None) -> None:
        if clock is not None:
            self._clocks[node] = clock

    def board(self, node: int, time: float) -> float:
        """A time by a host's clock, by the board's."""
        clock = self._clocks.get(node)
        return time + clock["offset_s"] if clock else time

    def apart(self, one: int, other: int) -> float:
        """Seconds below which nobody can tell which of two events on these hosts came first: what each host's offset is
        known to, both together. 0 on one host, whose clock both share."""
        if one == other:
            return 0.0
        return sum(self._clocks[node]["within_s"] for node in (one, other) if node in self._clocks)
