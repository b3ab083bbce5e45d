"""Where the ranks of an attempt meet: a store on one address, at a port that the kernel chose. Nothing is agreed on.

torchrun's own rendezvous unpickles what anybody puts into its store, and its store listens on every interface. Ours
knows the nodes and their order, so there is nothing to agree on. What passes through the store is not authenticated:
who reaches the lead's address can read and write it. Of one host it listens on loopback, of several on the lead's
address alone. In bubblewrap the loopback is the job's own (`workers.host.start.programs.stays_here` says when).

Checked on torch 2.13.0: `RendezvousHandler` and `TCPStore(master_listen_fd=...)`.
tests/workers/host/start/test_launch.py fails when they change.
"""

from __future__ import annotations

import contextlib
import json
import socket
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not declared
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from workers.host.address import listening

BACKEND = "known"
STORE_TIMEOUT = timedelta(seconds=60)
WORD_BYTES = 4096
FOLLOWERS = "meshboard/followers"  # in the store: how many have found it


class Meeting(NamedTuple):
    """The store that all nodes share."""

    store: TCPStore
    address: str
    port: int


class NotMetError(RuntimeError):
    """The supervisor did not say where the others are."""


class Known(RendezvousHandler):
    """Every node and its place are known before any starts."""

    def __init__(self, run_id: str, node: int, num_nodes: int, meeting: Meeting) -> None:
        self._run_id, self._node, self._num_nodes = run_id, node, num_nodes
        self._store = meeting.store
        self._info = RendezvousStoreInfo(meeting.address, meeting.port)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._node, self._num_nodes, self._info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody to keep out."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def lead(address: str) -> Meeting:
    """A store of our own on this address alone. Raises OSError where no interface has it."""
    door = listening(address)
    port = door.getsockname()[1]
    # The store owns the descriptor from here on.
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=door.detach(),
        use_libuv=True,
    )
    return Meeting(store, address, port)


def follow(address: str, port: int) -> Meeting:
    """The lead's store. Raises torch's DistStoreError when it does not answer."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    # It answers: whoever took the connection could be stopped. Only our supervisor's patience bounds this one.
    store.add(FOLLOWERS, 1)
    return Meeting(store, address, port)


def meet(node: int, address: str, supervisor: socket.socket) -> Meeting:
    """One member of a gang: say that we are ready, and where the store is if we lead; go on when all are.

    The supervisor hears `{"port": n}` (0: we do not lead) and answers `{"address", "port"}` of the lead, and hears
    `{"met": true}` once we are there, each on a line. Whoever else is ready it asks the board.

    Raises:
        NotMetError: the supervisor went away.
    """
    own = lead(address) if node == 0 else None
    supervisor.sendall(json.dumps({"port": own.port if own else 0}).encode() + b"\n")
    with supervisor.makefile("rb") as told:
        line = told.readline(WORD_BYTES)
    if not line.endswith(b"\n"):
        raise NotMetError("the supervisor did not report that all hosts are ready")
    said = json.loads(line)
    met = own or follow(said["address"], said["port"])
    with contextlib.suppress(OSError):  # an older supervisor has hung up: it waits for nothing more
        supervisor.sendall(b'{"met": true}\n')
    return met


def answer(supervisor: socket.socket) -> None:
    """Send back what it says, by which it knows that we live, until it hangs up."""
    with supervisor, contextlib.suppress(OSError):
        while told := supervisor.recv(WORD_BYTES):
            supervisor.sendall(told)
