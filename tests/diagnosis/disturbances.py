"""Disturb a rank from outside: signals, a CPU quota, and the network of its host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.cluster.network import Cable

QUOTA = 0.05  # of a processor
PERIOD_US = 100_000
HALTED_S, RUNNING_S = 0.3, 0.2
SLOW = "20mbit"  # a step of the case sends 31 Mbit over it
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def find_rank_pid(pids: Iterable[int], rank: int) -> int:
    """Return the process of a rank.

    Raises:
        AssertionError: None of the processes is the rank.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment and b"-u" in words[:2]:
                return pid
    raise AssertionError(f"rank {rank} is not there")


@contextlib.contextmanager
def limit_cpu(pid: int) -> Iterator[None]:
    """Limit the process to QUOTA of a CPU, in a nested cgroup."""
    one = V1.exists()
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") or (not one and number == "0"):
            break
    folder = (V1 if one else V2) / path.lstrip("/") / f"meshboard-quota-{pid}"
    home = folder.parent
    folder.mkdir()
    try:
        if one:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(int(QUOTA * PERIOD_US)))
        else:
            (folder / "cpu.max").write_text(f"{int(QUOTA * PERIOD_US)} {PERIOD_US}")
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (home / "cgroup.procs").write_text(str(pid))
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def stop_repeatedly(pid: int) -> Iterator[None]:
    """Stop and continue the process repeatedly, as a CPU limiter does."""
    over = threading.Event()

    def work() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(HALTED_S)
                os.kill(pid, signal.SIGCONT)
                over.wait(RUNNING_S)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def stop_process(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def cut_link(one: Cable, other: Cable) -> Iterator[None]:
    """Cut the network between two hosts. Both reach the board."""
    ways = [(one.namespace, other.address), (other.namespace, one.address)]
    for namespace, address in ways:
        _run_ip("-n", namespace, "route", "add", "blackhole", address)
    try:
        yield
    finally:
        for namespace, address in ways:
            _run_ip("-n", namespace, "route", "del", "blackhole", address)


@contextlib.contextmanager
def slow_down_link(cable: Cable) -> Iterator[None]:
    cable.slow(SLOW)
    try:
        yield
    finally:
        for namespace, device in ((cable.switch, cable.port), (cable.namespace, cable.interface)):
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=False)


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
