"""The launcher: closed ports, and the first failed rank."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler

from contracts.control import VERSION, LaunchOrder
from tests.support.processes import scale_timeout, wait_until
from workers.host.attempts import AttemptDir, claim_attempt
from workers.host.job_limits import JobLimits
from workers.host.launch import RankDeath, StaticRendezvous, find_first_death
from workers.host.processes import find_processes
from workers.host.rank_files import read_rank_error
from workers.host.settings import HostSettings
from workers.host.supervisor.torchrun_process import TorchrunProcess

# Both ranks wait to be looked at. Then rank 1 raises; rank 0 waits for it, and dies of that a moment later.
SCRIPT = """
import json, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
own = dist.new_group([0, 1])
dist.all_reduce(torch.ones(1), group=own)
with open(f"{sys.argv[1]}.{rank}", "w") as out:
    told = {"address": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"])}
    json.dump({**told, "world": os.environ["WORLD_SIZE"], "arguments": sys.argv[3:]}, out)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
print("progress", flush=True)
print("a warning", file=sys.stderr, flush=True)
if rank == 1:
    raise ValueError("boom \\ud800\\0 " + "x" * 5000)
dist.all_reduce(torch.ones(1 << 20))
"""


# Options that torchrun would parse.
FOR_TORCHRUN = [
    "--rdzv-endpoint=0.0.0.0:1",
    "--rdzv_backend",
    "c10d",
    "--nnodes=7",
    "--nproc-per-node=9",
    "--no-python",
]
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
NOTHING = ("", "", None)


class Run:
    """A script job with two ranks and a guardian."""

    def __init__(self, folder: Path, script: str, arguments: list[str]) -> None:
        settings = HostSettings("", "here", 2, "cpu", *(folder / name for name in "rdcs"), "workers.trainer")  # type: ignore[call-arg]
        settings.script_root.mkdir(parents=True)
        (settings.script_root / "script.py").write_text(script)
        spec = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "script.py", "args": arguments}}
        order = LaunchOrder(v=VERSION, job="job", attempt=1, spec=spec, slots=[0, 1])
        attempt = claim_attempt(settings.run_dir, order)
        assert attempt is not None
        self.attempt: AttemptDir = attempt
        self.unpickled = folder / "unpickled"
        self.store: dict[str, Any] = {}
        self.listening: list[Any] = []
        self.visited: list[int] = []
        self.commands: list[list[str]] = []
        self.training = TorchrunProcess(
            attempt, order, settings, str(folder / "nobody-listens"), JobLimits(attempt, settings, has_own_user=False)
        )

    def failure(self) -> dict[str, Any]:
        assert self.attempt.failure_file.exists(), (self.attempt.logs / "launcher.log").read_text()
        found: dict[str, Any] = json.loads(self.attempt.failure_file.read_text())
        return found


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Inspect a run, let it fail, and return it."""
    folder = tmp_path_factory.mktemp("launch")
    go = folder / "go"
    run = Run(folder, SCRIPT, [str(folder / "told"), str(go), *FOR_TORCHRUN])

    async def work() -> int:
        await run.training.start()
        waiting = asyncio.create_task(run.training.wait())
        try:
            await asyncio.to_thread(wait_until, (folder / "told.1").exists, "rank 1 is in the group")
            await asyncio.to_thread(look)
        finally:
            go.touch()
        return await asyncio.wait_for(waiting, scale_timeout(60))

    def look() -> None:
        run.store = json.loads(wait_until((folder / "told.0").read_text, "rank 0 writes the address of its store"))
        for process in map(psutil.Process, find_processes("job", 1)):
            found = [c.laddr for c in process.net_connections("inet") if c.status in (psutil.CONN_LISTEN, "NONE")]
            run.listening += found
            run.commands.append(process.cmdline())
            # Where torchrun's own keeps its state, which it reads every second and when it ends.
            for address in found if process.cmdline()[1:3] == ["-m", "workers.host.launch"] else []:
                visitor = TCPStore("127.0.0.1", address.port, is_master=False, wait_for_workers=False)
                visitor.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Evil(run.unpickled))))
                run.visited.append(address.port)

    assert asyncio.run(work()) == 1
    yield run
    assert find_processes("job", 1) == []


def test_no_port_is_open_to_other_hosts(ended: Run) -> None:
    assert ended.store["address"] == "127.0.0.1"
    assert ended.store["port"] in {address.port for address in ended.listening}
    assert len(ended.listening) >= 3, "the store, and a listener of each rank"
    assert [address for address in ended.listening if address.ip not in ("127.0.0.1", "::1")] == []


def test_store_content_is_not_unpickled(ended: Run) -> None:
    assert ended.store["port"] in ended.visited
    assert not ended.unpickled.exists()


def test_torchrun_options_in_script_arguments_reach_the_script(ended: Run) -> None:
    assert ended.store["arguments"] == FOR_TORCHRUN
    assert (ended.store["world"], ended.store["address"]) == ("2", "127.0.0.1")
    assert len(ended.commands) >= 3, "the launcher and its ranks"
    assert not [word for command in ended.commands for word in command if word in FOR_TORCHRUN]


def test_reason_is_the_exception_of_the_first_rank(ended: Run) -> None:
    failure = ended.failure()
    assert (failure["rank"], failure["exit_code"], failure["signal"]) == (1, 1, None)
    assert failure["message"].startswith("ValueError: boom ? xxx"), "no NUL, no half character"
    assert 'script.py", line' in failure["traceback"]
    assert time.time() - 60 < failure["time"] <= time.time()
    assert len(failure["message"]) <= 2_000
    assert ended.attempt.failure_file.stat().st_size < 16_000
    assert "\0" not in failure["traceback"].encode().decode()


def death(rank: int, exit_code: int, noticed: int, time: float, message: str = "") -> RankDeath:
    return RankDeath(rank, exit_code, noticed, time, message, "")


@pytest.mark.parametrize(
    ("deaths", "first"),
    [
        ([death(0, 1, 100, 100.2, "A"), death(1, 1, 100, 100.1, "B")], 1),
        ([death(0, 1, 100, 100.2, LOST), death(1, 1, 100, 100.9, "B")], 1),
        ([death(0, 1, 100, 100.2, LOST), death(1, 3, 100, 101.0)], 1),
        ([death(0, 1, 100, 100.2, LOST), death(1, -9, 100, 101.0)], 1),
        ([death(0, -15, 100, 101.0), death(1, 1, 100, 100.9, "B")], 1),
        ([death(0, -9, 130, 131.0), death(1, 1, 100, 100.9, "B")], 1),
        ([death(0, 1, 100, 100.2, LOST), death(1, -15, 100, 101.0)], 0),
    ],
    ids=["earliest", "lost peer", "untold exit", "killed", "terminated", "killed by torchrun", "only victims"],
)
def test_names_the_cause_of_several_failures(deaths: list[RankDeath], first: int) -> None:
    assert find_first_death(deaths).rank == first
    assert find_first_death(deaths[::-1]).rank == first


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"message": 5}', b'{"message": {}}', b"[" * 100_000, b'"' + b"x" * 2**21, b"\xff"],
    ids=["empty", "cut off", "list", "null", "number", "no words", "deep", "huge", "no text"],
)
def test_ignores_an_invalid_error_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content)
    assert read_rank_error(path) == NOTHING


def test_does_not_block_on_an_irregular_error_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("fifo", "link", "absent", "."):
        assert read_rank_error(tmp_path / name) == NOTHING


@pytest.mark.parametrize("time_s", ["NaN", "Infinity", "-Infinity", "-1", "1e300"])
def test_ignores_an_invalid_time(tmp_path: Path, time_s: str) -> None:
    extra = f'{{"py_callstack": "", "timestamp": "1", "time_s": {time_s}}}'
    (tmp_path / "error.json").write_text(f'{{"message": {{"message": "x", "extraInfo": {extra}}}}}')
    assert read_rank_error(tmp_path / "error.json") == ("x", "", None)


def test_rendezvous_implements_the_interface_of_torch() -> None:
    assert torch.__version__.split("+")[0] == "2.13.0", "check workers.host.launch against the new torch"
    assert RendezvousHandler.__abstractmethods__ <= set(vars(StaticRendezvous))
    assert not StaticRendezvous.__abstractmethods__
    assert list(inspect.signature(DefaultLogsSpecs.reify).parameters) == ["self", "envs"]
    assert "master_listen_fd" in (TCPStore.__init__.__doc__ or "")
