"""A board with TLS, and a metered torchrun with two ranks."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from contracts.names import telemetry_stream
from tests.support.processes import ROOT, base_environment, run_process, run_redis
from tests.support.web import TlsSite

SCRIPT = ROOT / "tests" / "workers" / "external_runs" / "train.py"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    folder = tmp_path_factory.mktemp("board")
    with run_redis(folder / "redis") as redis:
        yield TlsSite(folder, redis)


class Metered:
    """A metered training run with two ranks. `enough()` lets it end."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self._folder, self.process, self._log = folder, process, log

    @property
    def terminal(self) -> str:
        return self._log.read_text(errors="replace")

    def enough(self) -> None:
        (self._folder / "enough").touch()

    def steps(self, rank: int) -> int:
        return int((self._folder / f"enough.{rank}").read_text())


def torchrun(folder: Path, code: int = 0, endpoint: str = "127.0.0.1:0", nodes: int = 1) -> list[str]:
    """Start two ranks on one node, or one rank on each of two nodes."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(2 // nodes),
    ]
    return [*launcher, *meeting, str(SCRIPT), f"{folder}/enough", str(code)]


@contextlib.contextmanager
def metered(
    board: TlsSite, folder: Path, *options: str, command: list[str] | None = None, code: int = 0, **changes: str
) -> Iterator[Metered]:
    environment = {
        **base_environment(),
        "MESHBOARD_URL": board.url,
        "MESHBOARD_TOKEN": board.users["owner"]["token"],
        "OMP_NUM_THREADS": "1",
        **changes,
    }
    if command is not None and command[0] == "sh":  # it starts no rank
        options = (*options, "--rank-timeout", "0")
    argv = [sys.executable, "-m", "workers.external_runs", "--ca-file", str(board.ca), *options, "--"]
    log = folder / "terminal.log"
    with run_process([*argv, *(command or torchrun(folder, code))], environment, log, ROOT) as process:
        try:
            yield Metered(folder, process, log)
        finally:
            for left in _below(process.pid):  # in separate groups and sessions
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def items(board: TlsSite, run: str, kind: str, node: int = 0) -> list[Any]:
    entries: Any = board.redis.client().xrange(telemetry_stream(run, 1, node))
    batches = [msgpack.unpackb(fields[b"b"]) for _, fields in entries]
    return [item for batch in batches for item in batch["items"] if item["kind"] == kind]


@pytest.fixture(scope="module")
def serving(board: TlsSite) -> Iterator[TlsSite]:
    with board.serve():
        yield board
