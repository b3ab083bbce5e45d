"""Read the TCP connections of this host, their groups, and the bytes that the kernel has sent."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

from tests.support.processes import scale_timeout, wait_until
from workers.meter import process_group

SENT = re.compile(r"bytes_sent:(\d+)")
RETRANSMITTED = re.compile(r"bytes_retrans:(\d+)")
TIMEOUT_S = scale_timeout(60)
UNACKNOWLEDGED = re.compile(r"(?:unacked|notsent):(\d+)")


class Connection(NamedTuple):
    """Local and remote address, each "address:port"."""

    local: str
    peer: str


class GroupConnections(NamedTuple):
    """A group of ranks and the connections of this host for it."""

    members: list[int]
    connections: list[Connection]


def read_sent_bytes(store_port: int, expected: Collection[Connection] = ()) -> dict[Connection, int]:
    """Return the bytes that the kernel has sent on each connection except the store's, when all are acknowledged.

    The listing is repeated until it has the `expected` connections, because it may miss some while others change.

    Raises:
        AssertionError: The connections or acknowledgements are missing after TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = subprocess.run(["ss", "-tinOH", "state", "established"], capture_output=True, text=True, check=True)
        lines = [line for line in result.stdout.splitlines() if f":{store_port} " not in line]
        found = {
            Connection(*line.split()[2:4]): _parse_count(SENT, line) - _parse_count(RETRANSMITTED, line)
            for line in lines
        }
        if found.keys() >= set(expected) and not any(UNACKNOWLEDGED.search(line) for line in lines):
            return found
        assert time.monotonic() < deadline, f"{expected} are not all there and acknowledged: {result.stdout}"
        time.sleep(0.01)


def _parse_count(counter: re.Pattern[str], line: str) -> int:
    found = counter.search(line)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def watch_groups(store_port: int) -> Iterator[dict[str, GroupConnections]]:
    """Record the connections of each group that the meter creates. Gloo connects all ranks at creation."""
    served: dict[str, GroupConnections] = {}
    known: set[Connection] = set()
    make: Callable[..., Any] = process_group.make_native_group

    def made(options: Any, *rest: Any) -> Any:
        known.update(read_sent_bytes(store_port))
        native = make(options, *rest)
        members = list(options.global_ranks_in_group) or list(range(options.group_size))

        def opened() -> GroupConnections | None:
            found = [connection for connection in read_sent_bytes(store_port) if connection not in known]
            return GroupConnections(members, found) if len(found) == len(members) - 1 else None

        served[options.group_id] = wait_until(opened, f"a connection to each other of {members}")
        return native

    with mock.patch.object(process_group, "make_native_group", made):
        yield served
