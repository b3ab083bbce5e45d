"""Coordination with other hosts: the common start of a gang, its lease, and checkpoints that another host sends.

A gang starts in two phases. Every member announces that it is ready, and at which address. When all are ready, each
member starts its ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from contracts.control import Gang, LaunchOrder, LoanAddress, ResumeCheckpoint
from contracts.names import LOAN_FILE
from workers.host.settings import JobUser
from workers.host.supervisor.publisher import BoardTransport, ReadyMember, TransportError

log = logging.getLogger(__name__)

GANG_START_TIMEOUT_S = 120.0  # for all members to be ready, from when this one is
GANG_POLL_INTERVAL_S = 0.2
LOAN_POLL_INTERVAL_S = 0.5
MAX_LAUNCHER_LINE_BYTES = 4096
MAX_HOSTS_NAMED = 5


class LauncherTimeouts(NamedTuple):
    """Timeouts of messages with the launcher, in seconds."""

    answer_s: float = 30.0
    # For a follower to connect to the store. Less than the launcher's own STORE_TIMEOUT, whose error names no host.
    # A stopped leader is reported first by its own supervisor, 11 s later.
    connect_s: float = 55.0
    interval_s: float = 5.0  # between two checks


LAUNCHER_TIMEOUTS = LauncherTimeouts()


class NotReadyError(RuntimeError):
    """A gang that cannot start. Names the missing hosts."""


class GangLease:
    """The time that a member of a gang continues without contact to the board.

    The board can have given up the attempt and started it on other hosts. An order without a gang never expires.
    """

    def __init__(self, order: LaunchOrder) -> None:
        self._duration_s = order["gang"].get("lease_s") if "gang" in order else None
        self.renew()

    def renew(self) -> None:
        """Restart the lease after a contact with the board."""
        self._renewed = _get_boot_time()

    def is_expired(self) -> bool:
        return self._duration_s is not None and _get_boot_time() - self._renewed > self._duration_s

    def describe(self) -> str:
        duration_s = self._duration_s or 0.0
        return f"no contact with the board for {duration_s:.0f} s, the limit of multi-host jobs; the ranks were stopped"


async def wait_for_members(
    transport: BoardTransport, order: LaunchOrder, own: ReadyMember, timeout_s: float = GANG_START_TIMEOUT_S
) -> ReadyMember:
    """Announce this member, and return the leader when every member is ready. Raises NotReadyError."""
    gang = order["gang"]
    deadline = time.monotonic() + timeout_s
    members: Mapping[int, ReadyMember] = {}
    while True:
        problem = ""
        try:
            if gang["node"] not in members:  # not announced yet, or lost by the board
                await transport.announce_ready(gang["node"], own)
            members = await transport.get_ready_members()
        except TransportError as error:
            problem = f"cannot reach the board within {timeout_s:.0f} s: {error}"
        missing = [node["host"] for index, node in enumerate(gang["nodes"]) if index not in members]
        if not missing and not problem:
            return members[0]
        if time.monotonic() > deadline:
            raise NotReadyError(problem[:900] or f"{_join_names(missing)} not ready within {timeout_s:.0f} s")
        await asyncio.sleep(GANG_POLL_INTERVAL_S)


async def coordinate_start(
    launcher: socket.socket,
    gang: Gang,
    address: str,
    get_leader: Callable[[ReadyMember], Awaitable[ReadyMember]],
    has_started: Callable[[], bool],
    timeouts: LauncherTimeouts = LAUNCHER_TIMEOUTS,
) -> None:
    """Start this member's launcher together with the other members.

    The launcher reports its port, gets the address of the leader's store, and confirms its connection. Until the ranks
    have started, for at most GANG_START_TIMEOUT_S, the launcher is asked whether it is alive, because ranks would wait
    forever for the store of a stopped leader. Returns early if the launcher ends. Raises NotReadyError.
    """
    own, leader_host = gang["nodes"][gang["node"]]["host"], gang["nodes"][0]["host"]
    no_answer = f"host {own} did not answer"
    reader, writer = await asyncio.open_connection(sock=launcher, limit=MAX_LAUNCHER_LINE_BYTES)
    try:
        port = _parse_port(await reader.readline())
        if port is None:
            return
        leader = await get_leader(ReadyMember(address, port))
        writer.write(json.dumps(leader._asdict()).encode() + b"\n")
        await writer.drain()
        if gang["node"]:
            no_connection = f"host {own} could not connect to host {leader_host}"
            is_alive = await _wait_for_line(reader, timeouts.connect_s, no_connection)
        else:
            is_alive = await _wait_for_line(reader, timeouts.answer_s, no_answer)
        deadline = time.monotonic() + GANG_START_TIMEOUT_S
        while is_alive and not has_started() and time.monotonic() < deadline:
            await asyncio.sleep(timeouts.interval_s)
            writer.write(b"\n")
            is_alive = await _wait_for_line(reader, timeouts.answer_s, no_answer)
    except (ConnectionError, ValueError):
        log.warning("the launcher ended before the gang was ready")
    finally:
        writer.close()


async def deliver_loan(
    transport: BoardTransport, checkpoint: ResumeCheckpoint, folder: Path, user: JobUser | None
) -> None:
    """Wait until another host offers a checkpoint, and write its address to a file for rank 0."""
    host = checkpoint["host"]
    member = None
    while member is None:
        with contextlib.suppress(TransportError):
            member = await transport.get_loan_address(host)
        if member is None:
            await asyncio.sleep(LOAN_POLL_INTERVAL_S)
    loan = LoanAddress(host=host, address=member.address, port=member.port, secret=checkpoint["lent"])
    draft = folder / f".{LOAN_FILE}"
    # Only the job's user can read the file. Other users can pass the folder.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as out:
        json.dump(loan, out)
        if user is not None:
            os.fchown(descriptor, user.uid, user.gid)
    draft.replace(folder / LOAN_FILE)


async def _wait_for_line(reader: asyncio.StreamReader, timeout_s: float, problem: str) -> bool:
    """Return whether the launcher sent a line, or False if it has ended. Raises NotReadyError."""
    try:
        async with asyncio.timeout(timeout_s):
            return bool(await reader.readline())
    except TimeoutError:
        raise NotReadyError(f"{problem} within {timeout_s:.0f} s") from None


def _parse_port(line: bytes) -> int | None:
    """Return the port of the launcher's store, or None if the line is invalid. The job's user can write it."""
    try:
        port = json.loads(line)["port"]
    except (ValueError, TypeError, KeyError):
        return None
    return port if type(port) is int and 0 <= port < 2**16 else None


def _join_names(hosts: list[str]) -> str:
    names = ", ".join(hosts[:MAX_HOSTS_NAMED])
    if len(hosts) == 1:
        return f"host {names} was"
    more = f" and {len(hosts) - MAX_HOSTS_NAMED} more" if len(hosts) > MAX_HOSTS_NAMED else ""
    return f"hosts {names}{more} were"


def _get_boot_time() -> float:
    """Return seconds since boot, including the time that the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
