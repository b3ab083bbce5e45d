"""The interface of a supervisor to the board: Redis for hosts, HTTPS for runs without a key to Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from contracts.control import AttemptReport


class TransportError(Exception):
    """The board is unreachable, or could not accept a message now. Send it again later."""


class MessageRefusedError(TransportError):
    """The board rejected a message, and will reject it again."""


class ReadyMember(NamedTuple):
    """A host of a multi-host job that waits for the others. `port` is that of the leader's store, or else 0."""

    address: str
    port: int


class BoardTransport(Protocol):
    """One attempt's connection to the board. Every method except `close` raises TransportError."""

    async def publish(self, batch: bytes) -> None:
        """Send one msgpack `Batch` of telemetry, and return when the board has it.

        After a TransportError or a cancellation, the board may have the batch. Send the identical bytes again before
        other batches, and the board takes them once. After MessageRefusedError, do not send them again.
        """

    async def send_report(self, report: AttemptReport) -> None:
        """Send the state of the attempt."""

    async def is_cancelled(self) -> bool:
        """Return whether the attempt must end."""

    async def get_requested_steps(self) -> frozenset[int]:
        """Return the steps whose timelines a user requested."""

    async def renew_stream(self) -> None:
        """Restart the expiry of the telemetry, after the last batch."""

    async def get_time(self) -> float:
        """Return the board's clock in unix seconds."""

    async def is_save_requested(self) -> bool:
        """Return whether the run must save a checkpoint and stop."""

    async def get_loan_address(self, host: str) -> ReadyMember | None:
        """Return the address at which a host sends a checkpoint, or None until the host has published it."""

    async def announce_ready(self, node: int, ready: ReadyMember) -> None:
        """Publish that this host is ready."""

    async def get_ready_members(self) -> Mapping[int, ReadyMember]:
        """Return the hosts that are ready, by node."""

    async def close(self) -> None:
        """Close the connection."""
