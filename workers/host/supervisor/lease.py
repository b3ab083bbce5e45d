"""How long a gang's member runs on without hearing from the board.

Its attempt may have been given up and begun anew elsewhere: what it cannot hear it must assume.
"""

from __future__ import annotations

import time

from contracts.control import LaunchOrder


class Lease:
    """Of an order without one it is never over."""

    def __init__(self, order: LaunchOrder) -> None:
        self._lasts_s = order["gang"].get("lease_s") if "gang" in order else None
        self.renew()

    def renew(self) -> None:
        """The board was heard."""
        self._heard = _passed()

    def over(self) -> bool:
        return self._lasts_s is not None and _passed() - self._heard > self._lasts_s

    def words(self) -> str:
        return (
            f"no contact with the board for {self._lasts_s:.0f} s, the limit of multi-host jobs; the ranks were stopped"
        )


def _passed() -> float:
    """Seconds since boot, those asleep too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
