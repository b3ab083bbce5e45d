"""Run small jobs while parts of an installation fail at random, from a seed (`make mix`). Needs root for mounts.

Processes are killed or stopped. For some seconds, the disk of the run directory is full, the temporary folder of the
host or PostgreSQL is read-only, or Redis refuses writes.

The command prints `N passed, N failed`. It checks that an acknowledged job is never lost, and that a job succeeds
if no fault was injected into it. Every history is valid, no request gets status 500, and no process or slot is left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import redis

from tests.support.board import Board, run_board
from tests.support.postgres import run_postgres, terminate_sessions
from tests.support.processes import fill_disk, mount_small_disk, wait_until
from workers.disk import read_json

TERMINAL = {"succeeded", "failed", "lost", "cancelled"}
# Allowed transitions of an attempt (docs/explanation/architecture.md).
LEGAL = {
    "queued": {"starting", "cancelling"},
    "starting": {"running", "succeeded", "failed", "lost", "unreachable", "cancelling"},
    "running": {"succeeded", "failed", "lost", "unreachable", "cancelling"},
    "unreachable": {"running", "lost", "cancelling"},
    "cancelling": {"cancelled"},
}
SERVICES = ("web", "controller", "host", "redis")
INSIDE = ("supervisor", "guardian", "torchrun", "rank")
MAX_LIVE_JOBS = 3
RUN_DISK_SIZE = "256m"


class FaultMix:
    """One run: the submitted jobs, and the faults."""

    def __init__(self, made: Board, database_url: str, seed: int) -> None:
        self.board, self.random = made, random.Random(seed)
        self.outages: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "full disk": lambda: fill_run_disk(made.state / "runs"),
            "read-only temporary folder": lambda: protect_folder(made.state / "tmp"),
            "read-only database": lambda: protect_database(database_url),
            "full redis": lambda: refuse_redis_writes(made),
        }
        self.outage: threading.Thread | None = None
        self.outage_errors: list[str] = []
        self.jobs: list[str] = []
        self.touched: dict[str, list[str]] = {}  # by job: the killed process, or "cancelled"
        self.killed: dict[str, int] = {}
        self.num_requeued = 0  # jobs with several attempts

    def retry(self, call: Callable[[], Any]) -> Any:
        """Retry until the web process responds. Raise a rejection."""

        def answered() -> list[Any] | None:
            try:
                return [call()]
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
            except (urllib.error.URLError, ConnectionError, TimeoutError, OSError):
                pass
            return None

        found = wait_until(answered, "the web answers", 60, 0.2)
        assert found is not None
        return found[0]

    def submit(self) -> None:
        number = len(self.jobs)
        spec = {
            "name": f"mix {number}",
            "model": {"preset": "gpt-tiny"},
            "layout": {"dp": self.random.choice((1, 2))},
            "train": {"steps": self.random.randint(20, 200), "global_batch": 2, "seq_len": 32, "eval_every": 0},
        }
        # Repeat the request with the same key until the web responds. A web killed during a submit must not create
        # two jobs.
        self.jobs.append(str(self.retry(lambda: self.board.call("POST", "jobs", spec, key=f"mix-{number}"))["id"]))

    def list_live_jobs(self) -> list[str]:
        return [job for job in self.jobs if self.get_state(job) not in TERMINAL]

    def get_state(self, job: str) -> str:
        return str(self.retry(lambda: self.board.get_job(job))["status"])

    def inject_fault(self) -> None:
        is_out = self.outage is not None and self.outage.is_alive()
        victim = self.random.choice([*SERVICES, *INSIDE, "cancel", "stop", *(() if is_out else self.outages)])
        self.killed[victim] = self.killed.get(victim, 0) + 1
        if victim in self.outages:
            self.outage = threading.Thread(target=self.hold_outage, args=(victim, self.random.uniform(3, 10)))
            self.outage.start()
            return
        if victim in SERVICES:
            pid = self.board.info["pids"].get(victim)
            if pid:
                _kill(pid, signal.SIGKILL, group=True)
            return
        running = [job for job in self.list_live_jobs() if self.board.list_processes(job)]
        if not running:
            return
        job = self.random.choice(running)
        if victim == "cancel":
            self.touched.setdefault(job, []).append("cancelled")
            with contextlib.suppress(urllib.error.HTTPError):  # 409: it has just ended by itself
                self.retry(lambda: self.board.call("POST", f"jobs/{job}/cancel"))
            return
        if victim == "stop":
            # A job that is stopped for a moment is still healthy.
            pids = self.find_pids(job, self.random.choice(INSIDE))
            for pid in pids:
                _kill(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(0.5, 4))
            for pid in pids:
                _kill(pid, signal.SIGCONT)
            return
        pids = self.find_pids(job, victim)
        if pids:
            self.touched.setdefault(job, []).append(f"{victim} killed")
            _kill(self.random.choice(pids), signal.SIGKILL)

    def hold_outage(self, name: str, seconds: float) -> None:
        try:
            with self.outages[name]():
                time.sleep(seconds)
        except Exception as error:
            self.outage_errors.append(f"{name}: {error!r}")

    def find_pids(self, job: str, part: str) -> list[int]:
        """Return the PIDs of a role in the job's first attempt."""
        if part == "supervisor":
            found = next((self.board.state / "runs/.host" / job).rglob("supervisor.pid"), None)
            recorded = read_json(found) if found else None
            return [recorded["pid"]] if recorded else []
        words = {"guardian": b"workers.host.guardian", "torchrun": b"workers.host.launch"}
        pids = []
        for pid in self.board.list_processes(job):
            with contextlib.suppress(OSError):
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                is_rank = any(
                    entry.startswith(b"RANK=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                )
                if is_rank if part == "rank" else words[part] in arguments:
                    pids.append(pid)
        return pids

    def list_problems(self) -> list[str]:
        """Return the problems at the end of the run."""
        wrong = [f"outage {error}" for error in self.outage_errors]
        if failed := [line for line in self.board.read_log("web").splitlines() if "Internal Server Error" in line]:
            wrong.append(f"{len(failed)} requests got status 500: {failed[0]}")
        for job in self.jobs:
            result = self.retry(lambda job=job: self.board.get_job(job))
            history = [change["status"] for change in result["history"]]
            by_attempt = itertools.groupby(result["history"], lambda change: change["attempt"])
            attempts = [[change["status"] for change in changes] for _, changes in by_attempt]
            done = ", ".join(self.touched.get(job, [])) or "nothing done to it"
            if result["status"] not in TERMINAL:
                wrong.append(f"{job} never ended: {history} ({done})")
            if job not in self.touched and result["status"] != "succeeded":
                reason = (result["exit"] or {}).get("reason") or result["history"][-1]["reason"]
                wrong.append(f"{job} was healthy and is {result['status']}: {reason}")
            self.num_requeued += len(attempts) > 1
            if not all(map(is_legal, attempts)):
                wrong.append(f"{job} has an illegal history: {attempts}")
            if left := self.board.list_processes(job):
                wrong.append(f"{job} left processes {left}")
        free = self.retry(lambda: self.board.call("GET", "hosts"))[0]
        if free["free_slots"] != free["slots"]:
            wrong.append(f"slots are still held: {free['free_slots']} of {free['slots']} are free")
        return wrong


def is_legal(history: list[str]) -> bool:
    """Return whether an attempt can have these statuses in turn. A fault of the host ends it without a final status."""
    pairs = itertools.pairwise(history)
    return history[0] == "queued" and all(after in LEGAL.get(before, set()) for before, after in pairs)


@contextlib.contextmanager
def fill_run_disk(disk: Path) -> Iterator[None]:
    with contextlib.suppress(AssertionError):  # a job that ends frees space
        fill_disk(disk)
    yield
    (disk / "filling").unlink()


@contextlib.contextmanager
def protect_folder(folder: Path) -> Iterator[None]:
    """Mount an empty read-only file system over a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=True)
    yield
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def protect_database(url: str) -> Iterator[None]:
    def set_read_only(value: str) -> None:
        with psycopg.connect(url, autocommit=True) as database:
            database.execute("SET default_transaction_read_only = off")
            name = database.info.dbname
            database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")  # type: ignore[arg-type]
            terminate_sessions(database)

    set_read_only("on")
    yield
    set_read_only("off")


@contextlib.contextmanager
def refuse_redis_writes(board: Board) -> Iterator[None]:
    """Set a memory limit, as far as Redis is there: another fault may kill it, and a new process has no limit."""
    for limit in (1, 0):
        with contextlib.suppress(redis.ConnectionError):
            board.connect_redis().config_set("maxmemory", limit)
        if limit:
            yield


def _kill(pid: int, number: signal.Signals, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, number)


def run(seconds: float, seed: int) -> int:
    with contextlib.ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshboard-mix-"))) / "state"
        (state / "tmp").mkdir(parents=True)
        (state / "tmp").chmod(0o1777)
        stack.enter_context(mount_small_disk(state / "runs", RUN_DISK_SIZE))
        url = stack.enter_context(run_postgres()).url
        made = stack.enter_context(run_board(state, MESHBOARD_DATABASE_URL=url, TMPDIR=str(state / "tmp")))
        mix = FaultMix(made, url, seed)
        deadline = time.monotonic() + seconds
        next_fault = time.monotonic() + 5
        while time.monotonic() < deadline:
            if len(mix.list_live_jobs()) < MAX_LIVE_JOBS:
                mix.submit()
            if time.monotonic() >= next_fault:
                mix.inject_fault()
                next_fault = time.monotonic() + mix.random.uniform(2, 10)
            time.sleep(0.3)
        if mix.outage:
            mix.outage.join()
        print(f"seed {seed}: {len(mix.jobs)} jobs, faults {dict(sorted(mix.killed.items()))}", flush=True)
        with contextlib.suppress(AssertionError):  # `check` reports jobs that have not ended by then
            wait_until(lambda: not mix.list_live_jobs(), "every job has ended", 180, 1)
            wait_until(lambda: not [job for job in mix.jobs if made.list_processes(job)], "no process is left", 30, 0.5)
            wait_until(
                lambda: all(h["free_slots"] == h["slots"] for h in made.call("GET", "hosts")), "slots are free", 30
            )
        wrong = mix.list_problems()
    for line in wrong:
        print(f"FAILED {line}")
    failed = len({line.split()[0] for line in wrong})
    print(f"{mix.num_requeued} jobs were queued again")
    print(f"{len(mix.jobs) - failed} passed, {failed} failed")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mix", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return run(options.seconds, options.seed)


if __name__ == "__main__":
    sys.exit(main())
