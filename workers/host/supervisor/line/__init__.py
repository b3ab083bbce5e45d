"""What a supervisor speaks to the board through: Redis for our own hosts, HTTPS for whoever has no key to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from contracts.control import AttemptReport


class LineError(Exception):
    """The board did not take it, or could not be asked, just now: say it again later."""


class RefusedError(LineError):
    """The board heard it and takes it neither now nor later."""


class Line(Protocol):
    """One attempt's way to the board. Every method but `close` raises LineError."""

    async def publish(self, batch: bytes) -> None:
        """One msgpack `Batch` of telemetry, behind those before it. Returns once the board has it.

        Where it raises LineError, or is cancelled, the board may have it: the very same bytes are to be said again
        before others, and it takes them once. Not so after RefusedError.
        """

    async def report(self, report: AttemptReport) -> None:
        """Tell the attempt's state."""

    async def cancelled(self) -> bool:
        """Is the attempt to end?"""

    async def wanted(self) -> frozenset[int]:
        """Steps that somebody asked to see event by event; none where the board cannot say."""

    async def renew(self) -> None:
        """After the last batch: what was published lives on for as long as it may."""

    async def close(self) -> None:
        """No more is said."""


class Ready(NamedTuple):
    """A member of a gang that waits for the others. `port`: of the lead's store; 0 where it does not lead."""

    address: str
    port: int


class GangLine(Line, Protocol):
    """What a member of a gang speaks through."""

    async def now(self) -> float:
        """The board's clock, unix seconds."""

    async def asked_to_save(self) -> bool:
        """Is the run to save a checkpoint and stop?"""

    async def lent_at(self, host: str) -> Ready | None:
        """Where a host lends the attempt a checkpoint; None while it has not said so."""

    async def say_ready(self, node: int, ready: Ready) -> None:
        """Tell the other members."""

    async def who_is_ready(self) -> Mapping[int, Ready]:
        """By node."""
