"""A board that was there may be away for a while, as when it is upgraded."""

from __future__ import annotations

import time

from meshboard.errors import AwayError, RefusedError

AWAY_S = 600.0
PAUSE_S = 1.0  # before it is asked again


class Patience:
    """With one board, from when it was heard: `heard` says whether it has been already."""

    def __init__(self, *, heard: bool = True) -> None:
        self._heard = time.monotonic() if heard else None

    def hears(self) -> None:
        self._heard = time.monotonic()

    def rest(self) -> None:
        time.sleep(PAUSE_S)

    def bear(self, error: AwayError | RefusedError) -> None:
        """Wait a little; raises `error` where it does not pass by itself, the board never spoke, or not for AWAY_S."""
        if self._heard is None or not _passes(error) or time.monotonic() - self._heard > AWAY_S:
            raise error
        self.rest()


def _passes(error: AwayError | RefusedError) -> bool:
    """Whether it may be otherwise in a while: the board is away, or has too much to do."""
    return isinstance(error, AwayError) or error.status == 429 or error.status >= 500
