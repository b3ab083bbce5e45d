"""Ranks and what starts them, which end whatever they do: those that take too long tell where they stand."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

from tests.support.patience import patient
from tests.support.processes import ROOT

LAST_WORDS_S = 10
AT_IMPORT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read when torch is


class Launcher(Protocol):
    """What starts ranks and ends after them; as `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """argv of a launcher on this machine alone, its store on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--log-dir", os.devnull, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *program]


def run_to_end(
    argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path = ROOT, limit_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text. Ranks have sessions of their own, and none of them is left behind.

    Raises:
        AssertionError: it took longer than `limit_s`, patiently; with all that was said, and each thread's stack.
    """
    given = {**environment, "PYTHONFAULTHANDLER": "1"}
    return _to_end(
        lambda out, err: subprocess.Popen(argv, cwd=cwd, env=given, stdin=subprocess.DEVNULL, stdout=out, stderr=err),
        argv,
        limit_s,
    )


def forked(
    num_ranks: int, module: str, *arguments: str, limit_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the `main` of a module on so many ranks to their end, as `torchrun` would in twice the time. `variables` are
    set in the environment that they have of ours.

    Raises:
        AssertionError: as `run_to_end` does.
    """
    asked = {"ranks": num_ranks, "module": module, "arguments": arguments, "environment": {**os.environ, **variables}}
    return _to_end(lambda out, err: _Forked(_nursery(), asked, (out, err)), [module, *arguments], limit_s)


class _Forked:
    """A launcher in the nursery."""

    def __init__(self, nursery: socket.socket, asked: object, outputs: tuple[IO[str], IO[str]]) -> None:
        self._line = nursery
        self.returncode: int | None = None
        socket.send_fds(nursery, [json.dumps(asked).encode()], [output.fileno() for output in outputs])
        self.pid = int(nursery.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = int(self._line.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("ranks", timeout or 0) from None
            finally:
                self._line.settimeout(None)
        return self.returncode


@functools.cache
def _nursery() -> socket.socket:
    """The line to this process' own; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **AT_IMPORT, "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return ours


def _to_end(
    start: Callable[[IO[str], IO[str]], Launcher], what: Sequence[str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        launcher = start(out, err)
        in_time = True
        try:
            launcher.wait(patient(limit_s))
        except subprocess.TimeoutExpired:
            in_time = False
            _end(launcher, signal.SIGABRT)
        finally:
            _end(launcher, signal.SIGKILL)
        for said in (out, err):
            said.seek(0)
        ended = subprocess.CompletedProcess(what, launcher.returncode or 0, out.read(), err.read())
    assert in_time, (
        f"{' '.join(what)} took longer than {patient(limit_s):.0f} s\n{ended.stdout[-4000:]}\n{ended.stderr[-20000:]}"
    )
    return ended


def _end(launcher: Launcher, number: signal.Signals) -> None:
    """Signal the launcher and all below it, the ranks before who watches them, and wait for their end: of one after
    the other, whose stacks would mingle in what they share."""
    if launcher.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher.pid)
        ranks = process.children(recursive=True)
        for found in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)
            psutil.wait_procs([found], LAST_WORDS_S / len(ranks))
        process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(LAST_WORDS_S)
