"""The socket on which the ranks of an attempt speak: one frame after the other, each checked, none too fast."""

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
from workers.host.supervisor.bucket import Bucket

log = logging.getLogger(__name__)

READ_BYTES_PER_S = 4 * 2**20  # of all ranks together; then their sockets fill and their meters thin
READ_BURST = 16 * 2**20
SMALL_FRAME = 2**20  # larger ones are read one at a time: each connection could hold FRAME_BYTES otherwise
BODY_S = 30.0  # for a frame that has begun
SPARE_CONNECTIONS = 8  # beside two for each rank
TOLD_REFUSALS = 20  # in our own log
PENANCE_S = 0.2  # before a sender of nonsense is cut off, so that coming back at once gains nothing


class Telemetry:
    """Hands items that fit to `take`; `refused` hears how many did not, a frame that is none being one."""

    def __init__(
        self,
        order: LaunchOrder,
        take: Callable[[list[Item]], Awaitable[None]],
        refused: Callable[[int], None],
        heard: Callable[[int, int], None] = lambda _rank, _pid: None,
    ) -> None:
        """`heard` is told which rank spoke, and which process it is."""
        self._order, self._take, self._refused, self._heard = order, take, refused, heard
        self._most = 2 * len(order["slots"]) + SPARE_CONNECTIONS
        self._open = self._num_refused = 0
        self._bucket = Bucket(READ_BYTES_PER_S, READ_BURST)
        self._large = asyncio.Lock()

    async def start(self, path: Path, owner: int | None) -> asyncio.Server:
        """Listen at `path`; only `owner`, a user id, may connect where it is not ourselves."""
        server = await asyncio.start_unix_server(self._serve, path)
        if owner is not None:
            os.chown(path, owner, -1)
        path.chmod(0o600)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= self._most:
                await self._listen(reader, _peer(writer))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the sender went, or stopped in the middle of a frame
        except BadMessageError as error:
            self._refuse("a rank was disconnected", str(error), 1)
            await asyncio.sleep(PENANCE_S)
        finally:
            self._open -= 1
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, pid: int) -> None:
        while True:
            (size,) = struct.unpack(">I", await reader.readexactly(4))
            if size > MAX_FRAME_BYTES:
                raise BadMessageError(f"a frame has {size:,} bytes, more than the limit of {MAX_FRAME_BYTES:,}")
            async with self._large if size > SMALL_FRAME else contextlib.nullcontext():
                async with asyncio.timeout(BODY_S):
                    body = await reader.readexactly(size)
            told, problems = salvage_frame(body)
            frame = self._checked(told)
            self._heard(frame["rank"], pid)
            if problems:
                self._refuse(f"items of rank {frame['rank']} were dropped", problems[0], len(problems))
            await self._take(frame["items"])
            self._bucket.spend(size)
            await self._bucket.paid()

    def _refuse(self, what: str, why: str, count: int) -> None:
        self._num_refused += 1
        if self._num_refused <= TOLD_REFUSALS:
            log.warning("%s: %s", what, why)
        self._refused(count)

    def _checked(self, frame: Frame) -> Frame:
        """Whoever speaks for another job, attempt or rank is cut off."""
        order = self._order
        if (frame["job"], frame["attempt"]) != (order["job"], order["attempt"]):
            raise BadMessageError(f"a frame belongs to another attempt, {frame['job']}/{frame['attempt']}")
        if frame["rank"] not in get_local_ranks(order):
            raise BadMessageError(f"this host has no rank {frame['rank']}")
        # A dry run speaks for ranks that are not there.
        told = {frame["rank"], *order["spec"].get("dry_ranks", [])}
        for item in frame["items"]:
            if item["kind"] == "gap" or item["kind"] == "log" or item["rank"] not in told:
                raise BadMessageError(f"rank {frame['rank']} sent a {item['kind']} that it is not allowed to send")
        return frame


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process at the other end, as the kernel knows it."""
    told = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", told)[0]
    return pid
