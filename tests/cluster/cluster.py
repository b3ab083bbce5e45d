"""Board and several hosts on one machine: network namespaces for hosts, PostgreSQL, and a Redis with a password."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgpack

from contracts.names import telemetry_stream
from tests.cluster.machine import Machine, powered
from tests.cluster.network import inside, switched
from tests.support.job_waits import record_ending, wait_for_status
from tests.support.postgres import Postgres, run_postgres
from tests.support.processes import ROOT, RedisServer, run_process, wait_until
from tests.support.web import Site, run_site
from workers.host.processes import find_processes

NAMES = ("anna", "bert", "cleo")


def get_missing_requirement() -> str:
    """Return the reason why this machine cannot run a cluster, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    trial = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "true"], capture_output=True, check=False)
    return f"namespaces are not allowed: {trial.stderr.decode().strip()}" if trial.returncode else ""


class Cluster:
    """Control a board and its hosts. The test's own thread runs in the board's network."""

    ended: ClassVar[set[tuple[str, int]]] = set()  # attempts that ended during a test

    def __init__(
        self,
        board: Site,
        database: Postgres,
        machines: dict[str, Machine],
        start_controller: Callable[[], subprocess.Popen[bytes]],
    ) -> None:
        self.board, self.database, self.machines = board, database, machines
        self.start_controller = start_controller
        self.controllers: list[subprocess.Popen[bytes]] = []

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.board.call(method, f"/api/v1/{path}", body, headers=self.board.build_token_header("staff"))
        assert answer.status < 300, f"{method} {path}: {answer.status} {answer.body.decode()[:2000]}"
        return answer.json()

    def submit(self, spec: dict[str, Any]) -> str:
        return str(self.call("POST", "jobs", spec)["id"])

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"jobs/{job}")
        return found

    def wait_for(self, job: str, *statuses: str, timeout_s: float = 90.0) -> dict[str, Any]:
        found = wait_for_status(lambda: self.job(job), job, statuses, timeout_s)
        if found["finished"]:
            self.ended.add((job, found["attempt"]))
            record_ending(found["status"], found["history"][-1]["reason"], len(find_processes(job, found["attempt"])))
        return found

    def cancel(self, job: str) -> None:
        """Cancel a job, and wait until all its processes have ended."""
        self.call("POST", f"jobs/{job}/cancel")
        self.wait_for(job, "cancelled")

    def processes(self, job: str, attempt: int = 1, on: Machine | None = None) -> list[int]:
        """List the processes of an attempt on all machines or on one."""
        found = find_processes(job, attempt)
        if on is None:
            return found
        own = os.readlink(f"/proc/{on.pid}/ns/net")
        return [pid for pid in found if _net_of(pid) == own]

    def rank_pid(self, job: str, rank: int, attempt: int = 1) -> int:
        """Return the process id of a rank."""
        for pid in find_processes(job, attempt):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment and b"-u" in words[:2]:
                    return pid
        raise AssertionError(f"rank {rank} of {job} is not there")

    def has_rank(self, job: str, rank: int, attempt: int = 1) -> bool:
        """Return True if the rank's process exists."""
        with contextlib.suppress(AssertionError):
            return self.rank_pid(job, rank, attempt) > 0
        return False

    def get_step(self, job: str, attempt: int = 1) -> int:
        """Return the newest step that rank 0 reported."""
        found = 0
        entries: Any = self.board.redis.client().xrevrange(telemetry_stream(job, attempt), count=20)
        for _, fields in entries:
            items = msgpack.unpackb(fields[b"b"])["items"]
            found = max([found, *(item["step"] for item in items if item["kind"] == "step" and item["rank"] == 0)])
        return found

    def wait_for_steps(self, job: str, more: int = 3, timeout_s: float = 90.0, attempt: int = 1) -> None:
        """Wait until the job has made `more` steps."""
        before = self.get_step(job, attempt)
        wait_until(lambda: self.get_step(job, attempt) >= before + more, f"{job} makes progress", timeout_s, 0.3)

    def member_hosts(self, job: str) -> list[Machine]:
        """Return the hosts of a job in rank order."""
        return [self.machines[member["host"]] for member in self.job(job)["members"]]

    def hosts(self) -> dict[str, dict[str, Any]]:
        answer = self.call("GET", "hosts")
        return {host["name"]: host for host in (answer["results"] if isinstance(answer, dict) else answer)}

    def wait_for_hosts(self, *names: str) -> None:
        wait_until(lambda: self.hosts().keys() >= set(names), f"{names} announce themselves", 60, 0.2)


def _net_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


@contextlib.contextmanager
def cluster(
    folder: Path,
    names: Sequence[str] = NAMES,
    slots: int = 2,
    shared: bool = True,
    etc_hosts: Mapping[str, str] | None = None,
    prepare: Callable[[Machine], None] = lambda _machine: None,
    board_settings: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[Cluster]:
    """Run a board and its hosts.

    `shared` stores checkpoints where all hosts see them. `etc_hosts` replaces the host names that a host knows.
    `prepare` receives each machine before it starts. `settings` apply to the hosts.
    """
    folder.chmod(0o711)  # the job's user traverses this folder
    with contextlib.ExitStack() as stack:
        board_cable, *cables = stack.enter_context(switched(["board", *names]))
        stack.enter_context(inside(board_cable.namespace))
        database = stack.enter_context(run_postgres())
        redis = RedisServer(folder / "redis", board_cable.address)
        redis.start()
        stack.callback(redis.stop)
        site_settings = {
            "MESHBOARD_CHECKPOINT_ROOT": str(folder / "checkpoints"),
            "MESHBOARD_ALLOWED_HOSTS": f"127.0.0.1,{board_cable.address}",
            # other hosts reach the board, and it rejects a published key
            "MESHBOARD_SECRET_KEY": secrets.token_urlsafe(48),
            "MESHBOARD_REDIS_FOR_HOSTS": redis.get_url(board_cable.address, password=False),
            **(board_settings or {}),
        }
        board = stack.enter_context(run_site(database.url, redis, folder / "board", listen="0.0.0.0", **site_settings))
        mint = [sys.executable, "manage.py", "join_token", "--uses", str(len(names))]
        token = subprocess.run(mint, env=board.environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        argv = [sys.executable, "manage.py", "controller"]

        def controller() -> subprocess.Popen[bytes]:
            return stack.enter_context(run_process(argv, board.environment, folder / "controller.log", ROOT))

        machines = {}
        all_names = "\n".join(f"{cable.address} {name}" for name, cable in zip(names, cables, strict=True))
        for name, cable in zip(names, cables, strict=True):
            own = folder / name
            given = {
                "MESHBOARD_URL": f"http://{board_cable.address}:{board.port}",
                "MESHBOARD_JOIN_TOKEN": token.strip(),
                "MESHBOARD_JOIN_INSECURE": "1",
                "MESHBOARD_DEVICE": "cpu",
                "MESHBOARD_SLOTS": str(slots),
                "MESHBOARD_DATA_ROOT": str(own / "data"),
                "MESHBOARD_CHECKPOINT_ROOT": str((folder if shared else own) / "checkpoints"),
                **settings,
            }
            machine = Machine(name, cable, own, given)
            machine.set_known_hosts((etc_hosts or {}).get(name, all_names))
            prepare(machine)
            machines[name] = stack.enter_context(powered(machine))
            machines[name].start_worker()
        made = Cluster(board, database, machines, controller)
        made.controllers = [made.start_controller()]
        made.wait_for_hosts(*names)
        yield made
