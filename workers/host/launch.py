"""torchrun for one host, without its open doors: `python -m workers.host.launch OPTIONS MODULE argument...`.

torchrun's own store listens on every interface, and its rendezvous unpickles what anybody puts there. Ranks of one
host need neither: their number is known, so there is nothing to agree on, and the store listens on loopback.

Checked on torch 2.13.0: `elastic_launch`, `RendezvousHandler`, `LogsSpecs` and `TCPStore(master_listen_fd=...)`.
tests/workers/host/test_launch.py fails when they change.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, not declared
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workers.host.files import write_json

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
MAX_TOLD_BYTES = 2**20
MAX_MESSAGE = 2_000  # characters
MAX_TRACEBACK = 8_000
# What a rank says that lost a peer: the peer is the cause.
LOST_PEER = re.compile(r"(closed|reset) by peer|broken pipe|connection (was )?(closed|reset|aborted)", re.IGNORECASE)


class OneHost(RendezvousHandler):
    """All ranks are here. They and torchrun share a store on loopback."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        # The store owns the descriptor from here on.
        self._store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
        )
        self._info = RendezvousStoreInfo(LOOPBACK, port)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, self._info)

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
        return ended, bool(LOST_PEER.search(death.message + death.traceback)), death.exit_code > 0, death.time

    return min(deaths, key=order)


def read_options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.host.launch", description=__doc__, allow_abbrev=False)
    parser.add_argument("--failure", type=Path, required=True, help="file to write who failed first to")
    parser.add_argument("--logs", required=True, help="directory of the ranks' logs")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--name", required=True, help="what torchrun calls this run")
    parser.add_argument("module", help="what `python -m` runs on every rank")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main() -> int:
    options = read_options(sys.argv[1:])
    rendezvous_handler_registry.register(BACKEND, OneHost)
    logs = Logs(log_dir=options.logs, redirects=Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id=options.name,
        rdzv_backend=BACKEND,
        max_restarts=0,
        local_addr=LOOPBACK,
        logs_specs=logs,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", options.module, *options.arguments)
    except ChildFailedError as error:
        deaths = [_death(rank, failure, logs.told[rank]) for rank, failure in error.failures.items()]
        write_json(options.failure, _report(first_of(deaths)))
        return 1
    return 0


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
            raise OSError(f"{path} is no file")
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
