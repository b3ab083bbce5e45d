"""torchrun without its open doors: `python -m workers.host.start.launch OPTIONS MODULE argument...`.

The ranks of one host meet on loopback. A member of a gang over several hosts has its supervisor on stdin, and starts
its ranks when all members are ready (`workers.host.start.rendezvous`).

Checked on torch 2.13.0: `elastic_launch` and `LogsSpecs`. tests/workers/host/start/test_launch.py fails
when they change.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workers import rank_environment
from workers.host.address import LOOPBACK
from workers.host.files import write_json
from workers.host.start.lost_peer import LOST_PEER
from workers.host.start.rendezvous import BACKEND, Known, Meeting, answer, lead, meet

MAX_TOLD_BYTES = 2**20
MAX_MESSAGE = 2_000  # characters
MAX_TRACEBACK = 8_000


class Logs(DefaultLogsSpecs):
    """Logs where torchrun puts them. Torch does not read what ranks told: a file that is no JSON would end it."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        found = super().reify(envs)
        self.told = found.error_files
        return replace(found, error_files=dict.fromkeys(found.error_files, ""))


class Death(NamedTuple):
    """A rank that did not end well. `message` is "" where it told nothing, `noticed` whole seconds."""

    rank: int
    exit_code: int
    noticed: int
    time: float
    message: str
    traceback: str


def first_of(deaths: list[Death]) -> Death:
    """The rank that pulled the others down.

    Torchrun ends the others with TERM, and 30 s later with KILL. A rank that a signal killed could say nothing, those
    that lost it could.
    """
    soon = min(death.noticed for death in deaths) + 5

    def order(death: Death) -> tuple[bool, bool, bool, float]:
        ended = death.exit_code == -signal.SIGTERM or death.noticed > soon
        return ended, lost_peer(death), death.exit_code > 0, death.time

    return min(deaths, key=order)


def lost_peer(death: Death) -> bool:
    """Whether it says that another rank was gone."""
    return bool(LOST_PEER.search(death.message + death.traceback))


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.host.start.launch", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--failure", type=Path, required=True, help="file for the report of the first failed rank")
    parser.add_argument("--logs", required=True, help="directory of rank logs")
    parser.add_argument("--ranks", type=int, required=True, help="first rank of this host")
    parser.add_argument("--node", type=int, default=0, help="number of this host in the gang, from 0")
    parser.add_argument("--nodes", type=int, default=1, help="number of hosts of the gang")
    parser.add_argument("--address", default=LOOPBACK, help="address of this host for the other hosts")
    parser.add_argument("--name", required=True, help="torchrun id of the run")
    parser.add_argument("module", help="module that `python -m` runs on each rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main() -> int:
    rank_environment.accept_sigterm_from_parent()
    options = read_options(sys.argv[1:])
    meeting = _meeting(options)
    known = Known(options.name, options.node, options.nodes, meeting)
    rendezvous_handler_registry.register(BACKEND, lambda _parameters: known)
    logs = Logs(log_dir=options.logs, redirects=Std.ALL)
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
        deaths = [_death(rank, failure, logs.told[failure.local_rank]) for rank, failure in error.failures.items()]
        try:
            write_json(options.failure, _report(first_of(deaths)))
        except OSError as trouble:  # a full disk: the supervisor goes by what the ranks printed
            print(f"Cannot write the report of the first failed rank: {trouble}", file=sys.stderr)
        return 1
    return 0


def _meeting(options: argparse.Namespace) -> Meeting:
    """Where the ranks meet; of a gang, when all its hosts are ready."""
    if options.nodes == 1:
        return lead(LOOPBACK)
    supervisor = _supervisor()
    found = meet(options.node, options.address, supervisor)
    threading.Thread(target=answer, args=(supervisor,), daemon=True).start()
    return found


def _supervisor() -> socket.socket:
    """What stdin was, which ranks must not inherit."""
    found = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return found


def _death(rank: int, failure: ProcessFailure, told: str) -> Death:
    message, traceback, time = read_told(Path(told))
    noticed = failure.timestamp
    # One who told nothing died in the second in which that was noticed, after those who told.
    return Death(rank, failure.exitcode, noticed, noticed + 1.0 if time is None else time, message, traceback)


def read_told(path: Path) -> tuple[str, str, float | None]:
    """Message, traceback and time that a rank left: what anybody may have written there."""
    try:
        content = _read(path)
        said = json.loads(content)["message"]
        if isinstance(said, str):
            return _text(said, MAX_MESSAGE), "", None
        extra = said.get("extraInfo") or {}
        time = float(extra.get("time_s") or extra["timestamp"])
        trace = str(extra.get("py_callstack", ""))[-MAX_TRACEBACK:]
        return _text(str(said["message"]), MAX_MESSAGE), _text(trace, MAX_TRACEBACK), time if 0 < time < 2**40 else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return "", "", None


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a file")
        return file.read(MAX_TOLD_BYTES)


def _text(text: str, limit: int) -> str:
    """At most so many characters that JSON, a database and a terminal can take."""
    return text[:limit].replace("\0", "").encode("utf-8", "replace").decode()


def _report(death: Death) -> dict[str, Any]:
    return {
        "rank": death.rank,
        "exit_code": death.exit_code,
        "signal": _signal_name(death.exit_code),
        "time": death.time,
        "message": death.message,
        "traceback": death.traceback,
        "lost_peer": lost_peer(death),
    }


def _signal_name(exit_code: int) -> str | None:
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


if __name__ == "__main__":
    sys.exit(main())
