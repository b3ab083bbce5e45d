"""The start of a gang, in two phases: every member says that it is ready, and where; when all have, each starts."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from contracts.control import Gang, LaunchOrder
from workers.host.supervisor.line import GangLine, LineError, Ready

log = logging.getLogger(__name__)

START_S = 120.0  # for all to be ready, from when we are
LOOK_S = 0.2
LAUNCHER_BYTES = 4096
MOST_NAMED = 5


class Patience(NamedTuple):
    """With a launcher, seconds."""

    answers: float = 30.0  # for a word of it
    # For one that does not lead to meet the others: less than its own (`rendezvous.STORE_TIMEOUT`), which knows no
    # names. Of a lead that stands still its own supervisor tells first, when it has ended it: 11 s later.
    follows: float = 55.0
    between: float = 5.0  # from one question to the next


PATIENCE = Patience()


class NotReadyError(RuntimeError):
    """The gang cannot start; says who is missing."""


async def gathered(line: GangLine, order: LaunchOrder, own: Ready, start_s: float = START_S) -> Ready:
    """The lead, once every member is ready.

    Raises:
        NotReadyError: not all were within `start_s`.
    """
    gang = order["gang"]
    deadline = time.monotonic() + start_s
    seen: Mapping[int, Ready] = {}
    while True:
        trouble = ""
        try:
            if gang["node"] not in seen:  # not yet, or the board has lost it
                await line.say_ready(gang["node"], own)
            seen = await line.who_is_ready()
        except LineError as error:
            trouble = f"cannot reach the board within {start_s:.0f} s: {error}"
        missing = [node["host"] for index, node in enumerate(gang["nodes"]) if index not in seen]
        if not missing and not trouble:
            return seen[0]
        if time.monotonic() > deadline:
            raise NotReadyError(trouble[:900] or f"{_names(missing)} not ready within {start_s:.0f} s")
        await asyncio.sleep(LOOK_S)


async def meet(
    launcher: socket.socket,
    gang: Gang,
    address: str,
    lead_of: Callable[[Ready], Awaitable[Ready]],
    started: Callable[[], bool],
    patience: Patience = PATIENCE,
) -> None:
    """Hear from the launcher that it is up, tell it the lead's store when all are, and hear that it is there. Then ask
    it whether it lives until the ranks have `started`, for START_S at most: they would wait for ever for the store of
    a lead that was stopped. Returns when the launcher has ended before that, which its exit tells of.

    Raises:
        NotReadyError: what `lead_of` raises; the launcher does not come or does not answer.
    """
    own, first = gang["nodes"][gang["node"]]["host"], gang["nodes"][0]["host"]
    reader, writer = await asyncio.open_connection(sock=launcher, limit=LAUNCHER_BYTES)
    try:
        port = _port(await reader.readline())
        if port is None:
            return
        lead = await lead_of(Ready(address, port))
        writer.write(json.dumps(lead._asdict()).encode() + b"\n")
        await writer.drain()
        if gang["node"]:
            alive = await _heard(reader, patience.follows, f"host {own} could not connect to host {first}")
        else:
            alive = await _heard(reader, patience.answers, f"host {own} did not answer")
        until = time.monotonic() + START_S
        while alive and not started() and time.monotonic() < until:
            await asyncio.sleep(patience.between)
            writer.write(b"\n")
            alive = await _heard(reader, patience.answers, f"host {own} did not answer")
    except (ConnectionError, ValueError):
        log.warning("the launcher ended before the gang was ready")
    finally:
        writer.close()


async def _heard(reader: asyncio.StreamReader, within_s: float, else_told: str) -> bool:
    """Whether the launcher said something; False when it has ended. Raises NotReadyError."""
    try:
        async with asyncio.timeout(within_s):
            return bool(await reader.readline())
    except TimeoutError:
        raise NotReadyError(f"{else_told} within {within_s:.0f} s") from None


def _port(line: bytes) -> int | None:
    """What the launcher says of its store; None for what is no port: a job's user could be talking."""
    try:
        port = json.loads(line)["port"]
    except (ValueError, TypeError, KeyError):
        return None
    return port if type(port) is int and 0 <= port < 2**16 else None


def _names(hosts: list[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return f"host{'s' * (len(hosts) > 1)} {', '.join(hosts[:MOST_NAMED])}{more} {'were' if len(hosts) > 1 else 'was'}"
