"""This host's TCP connections: which group each serves, and what the kernel has sent over it."""

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
    """Both ends, each "address:port"."""

    local: str
    peer: str


class Served(NamedTuple):
    """A group of ranks and this host's connections for it."""

    members: list[int]
    connections: list[Connection]


def sent(store_port: int, expected: Collection[Connection] = ()) -> dict[Connection, int]:
    """Bytes this host's kernel has sent, once all is acknowledged; the store's connections apart.

    A listing may miss a connection while others come and go, on whatever host: it is repeated until it has those
    `expected`.

    Raises:
        AssertionError: When that has not come about in TIMEOUT_S.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        told = subprocess.run(["ss", "-tinOH", "state", "established"], capture_output=True, text=True, check=True)
        lines = [line for line in told.stdout.splitlines() if f":{store_port} " not in line]
        found = {Connection(*line.split()[2:4]): _bytes(SENT, line) - _bytes(RETRANSMITTED, line) for line in lines}
        if found.keys() >= set(expected) and not any(UNACKNOWLEDGED.search(line) for line in lines):
            return found
        assert time.monotonic() < deadline, f"{expected} are not all there and acknowledged: {told.stdout}"
        time.sleep(0.01)


def _bytes(counter: re.Pattern[str], line: str) -> int:
    found = counter.search(line)
    return int(found[1]) if found else 0


@contextlib.contextmanager
def watched_groups(store_port: int) -> Iterator[dict[str, Served]]:
    """Every group the meter makes meanwhile, by name: gloo connects all its ranks while it is made."""
    served: dict[str, Served] = {}
    known: set[Connection] = set()
    make: Callable[..., Any] = process_group.make_native_group

    def made(options: Any, *rest: Any) -> Any:
        known.update(sent(store_port))
        native = make(options, *rest)
        members = list(options.global_ranks_in_group) or list(range(options.group_size))

        def opened() -> Served | None:
            found = [connection for connection in sent(store_port) if connection not in known]
            return Served(members, found) if len(found) == len(members) - 1 else None

        served[options.group_id] = wait_until(opened, f"a connection to each other of {members}")
        return native

    with mock.patch.object(process_group, "make_native_group", made):
        yield served
