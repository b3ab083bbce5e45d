"""Run launchers and ranks to completion. Those that exceed their time limit report the stacks of their threads."""

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

from tests.support.processes import ROOT, scale_timeout

KILL_TIMEOUT_S = 10
TORCH_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # read when torch is imported


class Launcher(Protocol):
    """A process that starts ranks and ends after them, with the interface of `subprocess.Popen`."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def build_torchrun_command(num_ranks: int, *program: str) -> list[str]:
    """Return the command line of torchrun on this host, with its store on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--log-dir", os.devnull, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *program]


def run_to_completion(
    argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path = ROOT, limit_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command with captured output, and end its ranks, which have their own sessions.

    Raises:
        AssertionError: The command exceeded `limit_s`. The message has its output and the stacks of its threads.
    """
    env = {**environment, "PYTHONFAULTHANDLER": "1"}
    return _run(
        lambda out, err: subprocess.Popen(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err),
        argv,
        limit_s,
    )


def run_ranks(
    num_ranks: int, module: str, *arguments: str, limit_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the `main` of a module on ranks that are forked, in half the time that torchrun takes.

    Args:
        variables: Environment variables of the ranks, in addition to those of this process.

    Raises:
        AssertionError: The ranks exceeded `limit_s`, as in `run_to_completion`.
    """
    environment = {**os.environ, **variables}
    request = {"ranks": num_ranks, "module": module, "arguments": arguments, "environment": environment}
    return _run(
        lambda out, err: _ForkedLauncher(_start_fork_server(), request, (out, err)), [module, *arguments], limit_s
    )


class _ForkedLauncher:
    def __init__(self, fork_server: socket.socket, request: object, outputs: tuple[IO[str], IO[str]]) -> None:
        self._connection = fork_server
        self.returncode: int | None = None
        socket.send_fds(fork_server, [json.dumps(request).encode()], [output.fileno() for output in outputs])
        self.pid = int(fork_server.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except TimeoutError:
                raise subprocess.TimeoutExpired("ranks", timeout or 0) from None
            finally:
                self._connection.settimeout(None)
        return self.returncode


@functools.cache
def _start_fork_server() -> socket.socket:
    """Start the fork server of this process, which ends with this process."""
    client, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server:
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(server.fileno())],
            cwd=ROOT,
            env={**os.environ, **TORCH_ENVIRONMENT, "PYTHONFAULTHANDLER": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[server.fileno()],
        )
    return client


def _run(
    start: Callable[[IO[str], IO[str]], Launcher], argv: Sequence[str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        launcher = start(out, err)
        in_time = True
        try:
            launcher.wait(scale_timeout(limit_s))
        except subprocess.TimeoutExpired:
            in_time = False
            _signal_all(launcher, signal.SIGABRT)
        finally:
            _signal_all(launcher, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(argv, launcher.returncode or 0, out.read(), err.read())
    assert in_time, (
        f"{' '.join(argv)} took longer than {scale_timeout(limit_s):.0f} s\n"
        f"{done.stdout[-4000:]}\n{done.stderr[-20000:]}"
    )
    return done


def _signal_all(launcher: Launcher, number: signal.Signals) -> None:
    """Signal the ranks, then the launcher, one at a time, because their output would mix."""
    if launcher.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher.pid)
        ranks = process.children(recursive=True)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
            psutil.wait_procs([rank], KILL_TIMEOUT_S / len(ranks))
        process.send_signal(number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(KILL_TIMEOUT_S)
