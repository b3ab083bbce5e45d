"""Ranks and what starts them, which end whatever they do: those that take too long tell where they stand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.patience import patient
from tests.support.processes import ROOT

LAST_WORDS_S = 10


def torchrun(num_ranks: int, *program: str) -> list[str]:
    """argv of a launcher on this machine alone, its store on a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--log-dir", os.devnull, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *program]


def forked(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """argv of the same, in half the time, of a module that has a `main` (`tests.support.forked`)."""
    return [sys.executable, "-m", "tests.support.forked", str(num_ranks), module, *arguments]


def run_to_end(
    argv: Sequence[str], environment: Mapping[str, str], *, cwd: Path = ROOT, limit_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text. Ranks have sessions of their own, and none of them is left behind.

    Raises:
        AssertionError: it took longer than `limit_s`, patiently; with all that was said, and each thread's stack.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        given = {**environment, "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(argv, cwd=cwd, env=given, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        in_time = True
        try:
            process.wait(patient(limit_s))
        except subprocess.TimeoutExpired:
            in_time = False
            _end(process, signal.SIGABRT, wait_s=LAST_WORDS_S)
        finally:
            _end(process, signal.SIGKILL, wait_s=LAST_WORDS_S)
        for said in (out, err):
            said.seek(0)
        ended = subprocess.CompletedProcess(argv, process.returncode, out.read(), err.read())
    assert in_time, (
        f"{' '.join(argv)} took longer than {patient(limit_s):.0f} s\n{ended.stdout[-4000:]}\n{ended.stderr[-20000:]}"
    )
    return ended


def _end(process: subprocess.Popen[bytes], number: signal.Signals, *, wait_s: float) -> None:
    """Signal the launcher and all below it, the ranks before who watches them, and wait for their end: of one after
    the other, whose stacks would mingle in what they share."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        ranks = launcher.children(recursive=True)
        for found in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.send_signal(number)
            psutil.wait_procs([found], wait_s / len(ranks))
    if process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
