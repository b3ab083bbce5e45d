"""The socket to which the ranks of an attempt send telemetry. Every frame is checked, and the rate is limited."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

from contracts.codec import MAX_FRAME_BYTES, BadMessageError, salvage_frame
from contracts.control import LaunchOrder, get_local_ranks
from contracts.telemetry.batches import Frame, Item
from workers.host.supervisor.publisher import TokenBucket

log = logging.getLogger(__name__)

MAX_READ_BYTES_PER_S = 4 * 2**20  # of all ranks; above it their sockets fill, and their meters send less
READ_BURST = 16 * 2**20
# larger frames are read one at a time, because each takes up to MAX_FRAME_BYTES of memory
MAX_SMALL_FRAME_BYTES = 2**20
FRAME_TIMEOUT_S = 30.0  # to receive a frame that has begun
SPARE_CONNECTIONS = 8  # in addition to two per rank
MAX_LOGGED_REFUSALS = 20
DISCONNECT_DELAY_S = 0.2  # after an invalid frame, so that an immediate reconnect gains nothing


class TelemetryServer:
    """Receive frames and check them.

    Args:
        take: gets the valid items.
        refused: gets the number of invalid items. An invalid frame counts as one.
        contacted: gets the rank and the PID of each sender.
    """

    def __init__(
        self,
        order: LaunchOrder,
        take: Callable[[list[Item]], Awaitable[None]],
        refused: Callable[[int], None],
        contacted: Callable[[int, int], None] = lambda _rank, _pid: None,
    ) -> None:
        self._order, self._take, self._refused, self._contacted = order, take, refused, contacted
        self._max_connections = 2 * len(order["slots"]) + SPARE_CONNECTIONS
        self._num_connections = self._num_refusals = 0
        self._bucket = TokenBucket(MAX_READ_BYTES_PER_S, READ_BURST)
        self._large_frame_lock = asyncio.Lock()

    async def start(self, path: Path, owner: int | None) -> asyncio.Server:
        """Listen at `path`. With `owner`, only this user ID can connect."""
        server = await asyncio.start_unix_server(self._serve, path)
        if owner is not None:
            os.chown(path, owner, -1)
        path.chmod(0o600)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= self._max_connections:
                await self._receive(reader, _get_peer_pid(writer))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the sender ended, or stopped inside a frame
        except BadMessageError as error:
            self._refuse("a rank was disconnected", str(error), 1)
            await asyncio.sleep(DISCONNECT_DELAY_S)
        finally:
            self._num_connections -= 1
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader, pid: int) -> None:
        while True:
            (size,) = struct.unpack(">I", await reader.readexactly(4))
            if size > MAX_FRAME_BYTES:
                raise BadMessageError(f"a frame has {size:,} bytes, more than the limit of {MAX_FRAME_BYTES:,}")
            async with self._large_frame_lock if size > MAX_SMALL_FRAME_BYTES else contextlib.nullcontext():
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    body = await reader.readexactly(size)
            frame, problems = salvage_frame(body)
            self._check(frame)
            self._contacted(frame["rank"], pid)
            if problems:
                self._refuse(f"items of rank {frame['rank']} were dropped", problems[0], len(problems))
            await self._take(frame["items"])
            self._bucket.spend(size)
            await self._bucket.wait_for_credit()

    def _refuse(self, event: str, reason: str, count: int) -> None:
        self._num_refusals += 1
        if self._num_refusals <= MAX_LOGGED_REFUSALS:
            log.warning("%s: %s", event, reason)
        self._refused(count)

    def _check(self, frame: Frame) -> None:
        """Raise BadMessageError if the sender claims another job, attempt, or rank."""
        order = self._order
        if (frame["job"], frame["attempt"]) != (order["job"], order["attempt"]):
            raise BadMessageError(f"a frame belongs to another attempt, {frame['job']}/{frame['attempt']}")
        if frame["rank"] not in get_local_ranks(order):
            raise BadMessageError(f"this host has no rank {frame['rank']}")
        # A dry run sends items for ranks without processes.
        ranks = {frame["rank"], *order["spec"].get("dry_ranks", [])}
        for item in frame["items"]:
            if item["kind"] == "gap" or item["kind"] == "log" or item["rank"] not in ranks:
                raise BadMessageError(f"rank {frame['rank']} sent a {item['kind']} that it is not allowed to send")


def _get_peer_pid(writer: asyncio.StreamWriter) -> int:
    """Return the PID of the sender, from the kernel."""
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
