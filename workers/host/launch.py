"""Run torchrun without open ports: `python -m workers.host.launch OPTIONS MODULE argument...`.

The ranks meet in a store on one address, at a port that the kernel chooses: on loopback for one host, and on the
leader's address for several hosts. Traffic with the store is not authenticated, so any process that reaches the address
can read and write it. In bubblewrap the loopback is private to the job (`workers.host.programs.needs_only_this_host`).

Torchrun's own rendezvous unpickles the content of its store, and its store listens on every interface. Here all nodes
and their order are known in advance, so the nodes do not need to agree on anything. On a node of a multi-host job,
stdin is a socket to the supervisor, and the ranks start when all nodes are ready.

Checked on torch 2.13.0: `elastic_launch`, `LogsSpecs`, `RendezvousHandler`, and `TCPStore(master_listen_fd=...)`.
tests/workers/host/test_launch.py fails when they change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # documented, not declared
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workers import rank_environment
from workers.disk import write_json
from workers.host.hardware import LOOPBACK, open_listener
from workers.host.rank_files import get_signal_name, has_lost_peer, read_rank_error

BACKEND = "known"
STORE_TIMEOUT = timedelta(seconds=60)
MAX_LINE_BYTES = 4096
FOLLOWERS_KEY = "meshboard/followers"  # number of nodes that have connected to the store
SIMULTANEOUS_S = 5  # torchrun kills the other ranks 30 s after the first failure


class SharedStore(NamedTuple):
    """The store of all nodes, with its address."""

    store: TCPStore
    address: str
    port: int


class RendezvousError(RuntimeError):
    """The supervisor closed its socket before the other nodes were ready."""


class StaticRendezvous(RendezvousHandler):
    """A rendezvous of nodes whose number and order are known before they start."""

    def __init__(self, run_id: str, node: int, num_nodes: int, shared: SharedStore) -> None:
        self._run_id, self._node, self._num_nodes = run_id, node, num_nodes
        self._store = shared.store
        self._info = RendezvousStoreInfo(shared.address, shared.port)

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
        """Do nothing, because no other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def open_store(address: str) -> SharedStore:
    """Open a store that listens only on this address. Raises OSError if no interface has the address."""
    listener = open_listener(address)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),  # the store owns it now
        use_libuv=True,
    )
    return SharedStore(store, address, port)


def connect_to_store(address: str, port: int) -> SharedStore:
    """Connect to the leader's store. Raises torch's DistStoreError if the store does not respond."""
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)
    # A stopped process accepts connections too, so wait for a response. The supervisor limits the time.
    store.add(FOLLOWERS_KEY, 1)
    return SharedStore(store, address, port)


def join_gang(node: int, address: str, supervisor: socket.socket) -> SharedStore:
    """Report this node as ready, and return the store when all nodes are ready.

    Messages are JSON lines. The launcher sends `{"port": n}`, which is 0 except on the leader. The supervisor asks the
    board about the other nodes and sends `{"address", "port"}` of the leader. The launcher then sends `{"met": true}`.
    Raises RendezvousError.
    """
    own = open_store(address) if node == 0 else None
    supervisor.sendall(json.dumps({"port": own.port if own else 0}).encode() + b"\n")
    with supervisor.makefile("rb") as lines:
        line = lines.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise RendezvousError("the supervisor did not report that all hosts are ready")
    leader = json.loads(line)
    shared = own or connect_to_store(leader["address"], leader["port"])
    with contextlib.suppress(OSError):  # a supervisor of an older version has closed its socket
        supervisor.sendall(b'{"met": true}\n')
    return shared


def echo_until_closed(supervisor: socket.socket) -> None:
    """Send back each message, which shows the supervisor that this process is alive."""
    with supervisor, contextlib.suppress(OSError):
        while message := supervisor.recv(MAX_LINE_BYTES):
            supervisor.sendall(message)


class RankLogs(DefaultLogsSpecs):
    """Torchrun's log files. Torch must not read the error files, because invalid JSON would end torch."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        self.error_files = destination.error_files
        return replace(destination, error_files=dict.fromkeys(destination.error_files, ""))


class RankDeath(NamedTuple):
    """A rank that failed. `message` is empty if the rank recorded no error. `noticed` is in whole seconds."""

    rank: int
    exit_code: int
    noticed: int
    time: float
    message: str
    traceback: str
    pid: int = 0

    @property
    def lost_peer(self) -> bool:
        return has_lost_peer(self.message + self.traceback)


def find_first_death(deaths: list[RankDeath]) -> RankDeath:
    """Return the rank that caused the others to fail.

    Torchrun ends the other ranks with TERM, and 30 s later with KILL. A rank that a signal killed records no error, but
    the ranks that lost their connection to it do.
    """
    latest = min(death.noticed for death in deaths) + SIMULTANEOUS_S

    def get_order(death: RankDeath) -> tuple[bool, bool, bool, float]:
        was_ended = death.exit_code == -signal.SIGTERM or death.noticed > latest
        return was_ended, death.lost_peer, death.exit_code > 0, death.time

    return min(deaths, key=get_order)


def parse_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.host.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--failure", type=Path, required=True, help="file for the report of the first failed rank")
    parser.add_argument("--logs", required=True, help="directory of rank logs")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this host")
    parser.add_argument("--node", type=int, default=0, help="number of this host in the gang, from 0")
    parser.add_argument("--nodes", type=int, default=1, help="number of hosts of the gang")
    parser.add_argument("--address", default=LOOPBACK, help="address of this host for the other hosts")
    parser.add_argument("--name", required=True, help="torchrun id of the run")
    parser.add_argument("module", help="module that `python -m` runs on each rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main() -> int:
    rank_environment.accept_sigterm_from_parent()
    options = parse_options(sys.argv[1:])
    rendezvous = StaticRendezvous(options.name, options.node, options.nodes, _get_store(options))
    rendezvous_handler_registry.register(BACKEND, lambda _parameters: rendezvous)
    logs = RankLogs(log_dir=options.logs, redirects=Std.ALL)
    config = LaunchConfig(
        min_nodes=options.nodes,
        max_nodes=options.nodes,
        nproc_per_node=options.ranks,
        run_id=options.name,
        rdzv_backend=BACKEND,
        max_restarts=0,
        local_addr=options.address,
        logs_specs=logs,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", options.module, *options.arguments)
    except ChildFailedError as error:
        deaths = [_read_death(rank, f, logs.error_files[f.local_rank]) for rank, f in error.failures.items()]
        try:
            write_json(options.failure, _build_report(find_first_death(deaths)))
        except OSError as problem:  # a full disk: the supervisor then uses the ranks' logs
            print(f"Cannot write the report of the first failed rank: {problem}", file=sys.stderr)
        return 1
    return 0


def _get_store(options: argparse.Namespace) -> SharedStore:
    """Open the store of one host, or wait until all hosts are ready."""
    if options.nodes == 1:
        return open_store(LOOPBACK)
    supervisor = _take_stdin()
    shared = join_gang(options.node, options.address, supervisor)
    threading.Thread(target=echo_until_closed, args=(supervisor,), daemon=True).start()
    return shared


def _take_stdin() -> socket.socket:
    """Return the socket on stdin, and replace stdin, because ranks must not inherit the socket."""
    supervisor = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return supervisor


def _read_death(rank: int, failure: ProcessFailure, error_file: str) -> RankDeath:
    error = read_rank_error(Path(error_file))
    noticed = failure.timestamp
    # A rank without an error died in the second before it was noticed. Order it after the ranks with an error.
    time = noticed + 1.0 if error.time is None else error.time
    return RankDeath(rank, failure.exitcode, noticed, time, error.message, error.traceback, failure.pid)


def _build_report(death: RankDeath) -> dict[str, Any]:
    return {
        "rank": death.rank,
        "exit_code": death.exit_code,
        "signal": get_signal_name(death.exit_code),
        "time": death.time,
        "message": death.message,
        "traceback": death.traceback,
        "lost_peer": death.lost_peer,
        "pid": death.pid,
    }


if __name__ == "__main__":
    sys.exit(main())
