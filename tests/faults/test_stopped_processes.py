"""Stopped processes of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from contracts.names import cancel_key
from tests.support.host import Host, run_host
from tests.support.processes import RedisServer, is_gone, run_redis, wait_until
from workers.host.attempts import get_attempt_dir

ONE_RANK: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "train": {"steps": 100_000}}
STOPPED = ("supervisor", "guardian", "both", "torchrun", "rank")  # each job is named after what is stopped of it
TOLD = {
    "supervisor": "the supervisor is stopped (state T) since ",
    "guardian": "the guardian is stopped (state T) since ",
    "both": "the supervisor is stopped (state T) since ",
    "torchrun": "torchrun is stopped (state T) since ",
    "rank": "rank 0 is stopped (state T) since ",
}
WITHIN_S = 15.0


def part(machine: Host, job: str, name: str) -> list[int]:
    """Return the PIDs of a role in a job."""
    if name == "both":
        return part(machine, job, "supervisor") + part(machine, job, "guardian")
    if name == "supervisor":
        found = get_attempt_dir(machine.run_dir, job, 1).get_supervisor()
        return [] if found is None else [found.pid]
    module = {"guardian": "workers.host.guardian", "torchrun": "workers.host.launch"}.get(name)
    pids = []
    for process in map(psutil.Process, machine.list_processes(job)):
        is_rank = process.environ().get("RANK") == "0"
        if is_rank if module is None else process.cmdline()[1:3] == ["-m", module]:
            pids.append(process.pid)
    return pids


def note(machine: Host, job: str) -> str:
    """Return the note about a job in the host's latest heartbeat."""
    attempts = machine.read_events("host")[-1]["attempts"]
    return next((str(report.get("note", "")) for report in attempts if report["job"] == job), "")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[Host, tuple[str, ...]]]:
    """Start a host with PID namespaces and one without, each with its jobs."""
    forbidding = tmp_path / "bin"
    forbidding.mkdir()
    (forbidding / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (forbidding / "unshare").chmod(0o755)
    forbidden = {"PATH": f"{forbidding}:{os.environ['PATH']}", "MESHBOARD_SANDBOX": "off"}
    kinds: list[tuple[dict[str, str], tuple[str, ...]]] = [({}, STOPPED), (forbidden, ("guardian", "both"))]
    with contextlib.ExitStack() as entered:
        made = {}
        for number, (settings, jobs) in enumerate(kinds):
            server = entered.enter_context(run_redis(tmp_path / f"redis-{number}"))
            slots = str(len(jobs))
            opened = run_host(
                server, tmp_path / str(number), "tests.workers.term_ignoring_script", MESHBOARD_SLOTS=slots, **settings
            )
            machine = entered.enter_context(opened)
            entered.enter_context(machine.run_worker())
            made[machine] = jobs
        yield made


@pytest.mark.slow
def test_stopped_job_is_reported_and_ends_within_15_s_of_a_cancel(machines: dict[Host, tuple[str, ...]]) -> None:
    """Check ranks that ignore TERM and leave a child in another session."""
    each = [(machine, job) for machine, jobs in machines.items() for job in jobs]
    for machine, jobs in machines.items():
        for slot, job in enumerate(jobs):
            machine.send_launch_order(job, spec=ONE_RANK, first_slot=slot)
    wait_until(lambda: all(len(part(machine, job, "rank")) >= 2 for machine, job in each), "all ranks run")
    pids = {pid for machine, job in each for pid in (*machine.list_processes(job), *part(machine, job, "supervisor"))}
    halted = {pid for machine, job in each for pid in part(machine, job, job)}
    for pid in halted:
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(TOLD[job] in note(machine, job) for machine, job in each), "the hosts note it", 15)
    namespaced = next(iter(machines))
    for pid in part(namespaced, "rank", "rank"):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: note(namespaced, "rank") == "", "the note is gone", 10)
    request = time.monotonic()
    for machine, job in each:
        machine.server.client().set(cancel_key(job, 1), "1")
    wait_until(lambda: all(is_gone(pid) for pid in pids), "nothing is left", WITHIN_S + 10)
    assert time.monotonic() - request < WITHIN_S
    ends = {(machine, job): machine.wait_for_exit(job, 10) for machine, job in each}
    assert {end["outcome"] for end in ends.values()} == {"cancelled"}
    unanswered = {job for (_, job), end in ends.items() if end["reason"].endswith("; the supervisor did not answer")}
    assert unanswered == {"supervisor", "both"}


def test_expired_or_invalid_order_starts_nothing(redis_service: RedisServer, tmp_path: Path) -> None:
    """Check a late order, which must not start a finished job."""
    log = tmp_path / "worker.log"
    with run_host(redis_service, tmp_path) as machine, machine.run_worker():
        stale = machine.send_launch_order("stale", spec=ONE_RANK, expires_in_s=-1)
        machine.send_order({"v": 1, "job": "nonsense"})
        wait_until(
            lambda: "refused the order of stale/1: the order expired " in log.read_text(), "the stale one is refused"
        )
        wait_until(lambda: "refused an order: attempt: Field required" in log.read_text(), "the nonsense is refused")
        assert not stale.host_dir.exists()
        assert not stale.job_dir.exists()
