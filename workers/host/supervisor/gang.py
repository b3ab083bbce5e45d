"""The start of a gang, in two phases: every member says that it is ready, and where; when all have, each starts."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from contracts.control import LaunchOrder

log = logging.getLogger(__name__)

START_S = 120.0  # for all to be ready, from when we are
LOOK_S = 0.2
LAUNCHER_BYTES = 4096
MOST_NAMED = 5


class Ready(NamedTuple):
    """A member that waits for the others. `port`: of the lead's store; 0 where it does not lead."""

    address: str
    port: int


class Board(Protocol):
    """What of the board a gang needs to start. Both raise OSError, or what Redis raises, while it is away."""

    async def say_ready(self, node: int, ready: Ready) -> None: ...

    async def who_is_ready(self) -> Mapping[int, Ready]: ...


class NotReadyError(RuntimeError):
    """The gang cannot start; says who is missing."""


async def gathered(
    board: Board, order: LaunchOrder, own: Ready, away: tuple[type[Exception], ...], start_s: float = START_S
) -> Ready:
    """The lead, once every member is ready.

    `away`: what the board raises while it cannot be reached.

    Raises:
        NotReadyError: not all were within `start_s`.
    """
    gang = order["gang"]
    deadline = time.monotonic() + start_s
    seen: Mapping[int, Ready] = {}
    said, trouble = False, ""
    while True:
        try:
            if not said:
                await board.say_ready(gang["node"], own)
                said = True
            seen, trouble = await board.who_is_ready(), ""
        except away as error:
            said, trouble = False, f"; the board cannot be reached: {type(error).__name__}"
        if len(seen) == len(gang["nodes"]) and not trouble:
            return seen[0]
        if time.monotonic() > deadline:
            missing = [node["host"] for index, node in enumerate(gang["nodes"]) if index not in seen]
            raise NotReadyError(f"{_names(missing)} not ready within {start_s:.0f} s{trouble}"[:900])
        await asyncio.sleep(LOOK_S)


async def meet(launcher: socket.socket, address: str, lead_of: Callable[[Ready], Awaitable[Ready]]) -> None:
    """Hear from the launcher that it is up, and tell it the lead's store when all are. Returns when the launcher has
    ended before that, which its exit tells of.

    Raises:
        NotReadyError: what `lead_of` raises.
    """
    reader, writer = await asyncio.open_connection(sock=launcher, limit=LAUNCHER_BYTES)
    try:
        port = _port(await reader.readline())
        if port is None:
            return
        lead = await lead_of(Ready(address, port))
        writer.write(json.dumps(lead._asdict()).encode() + b"\n")
        await writer.drain()
    except (ConnectionError, ValueError):
        log.warning("the launcher ended before the gang was ready")
    finally:
        writer.close()


def _port(line: bytes) -> int | None:
    """What the launcher says of its store; None for what is no port: a job's user could be talking."""
    try:
        port = json.loads(line)["port"]
    except (ValueError, TypeError, KeyError):
        return None
    return port if type(port) is int and 0 <= port < 2**16 else None


def _names(hosts: Iterable[str]) -> str:
    named = list(hosts)
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    hosts_or_host = "hosts" if len(named) > 1 else "host"
    if not named:
        return "all hosts said so, and yet the gang was"
    return f"{hosts_or_host} {', '.join(named[:MOST_NAMED])}{more} {'were' if len(named) > 1 else 'was'}"
