"""What a host sees of a process: quotas, GPUs, and what py-spy says of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.telemetry.health import ProcessItem
from tests.workers.host.test_facts import FakeNvml
from workers.host.facts.gpus import Gpus
from workers.host.supervisor import ranks as ranks_module
from workers.host.supervisor.gauges import HostGauge, slots_of
from workers.host.supervisor.ranks import MOST_FRAMES, CannotReadError, Ranks, Taken, main_stack, rates, throttled_s


@pytest.mark.parametrize(
    ("line", "below", "name", "units"),
    [
        ("0::/jobs/one", "", "throttled_usec", 1_000_000),
        ("1:cpu,cpuacct:/jobs/one", "cpu,cpuacct", "throttled_time", 1_000_000_000),
    ],
)
def test_a_quota_of_the_group_or_of_one_above_it_counts(
    tmp_path: Path, line: str, below: str, name: str, units: int
) -> None:
    groups, proc = tmp_path / "groups", tmp_path / "proc"
    top = groups / below
    own = top / "jobs" / "one"
    own.mkdir(parents=True)
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(f"9:name=systemd:/\n2:memory:/jobs/one\n{line}\n")
    assert throttled_s(7, groups, proc) == 0
    (top / "cpu.stat").write_text(f"nr_periods 5\nnr_throttled 3\n{name} {5 * units // 2}\n")
    assert throttled_s(7, groups, proc) == 2.5
    (own / "cpu.stat").write_text(f"{name} {7 * units}\n")
    assert throttled_s(7, groups, proc) == 7.0
    (own / "cpu.stat").write_text(f"{name} nonsense\n")
    assert throttled_s(7, groups, proc) == 2.5
    assert throttled_s(8, groups, proc) == 0, "it is gone"


def test_nothing_waits_for_longer_than_all_of_the_time() -> None:
    assert rates(Taken(5.0, 1.0, 2.0, 3.0), Taken(7.0, 4.0, 6.5, 4.0)) == (1.5, 1.0, 0.5)
    assert rates(Taken(5.0, 1.0, 2.0, 3.0), Taken(7.0, 0.0, 0.0, 0.0)) == (0.0, 0.0, 0.0), "it is gone"


@pytest.fixture
def uncrowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine makes of a process is told too, and is not what is looked for."""
    monkeypatch.setattr(ranks_module, "CROWDED", math.inf)


def looks(ranks: Ranks, pid: int) -> None:
    """At rank 3, whose meter speaks all the while."""

    async def work() -> None:
        for _ in range(3):
            ranks.heard(3, pid)
            await ranks.look()

    asyncio.run(work())


@pytest.mark.usefixtures("uncrowded")
def test_a_process_that_is_stopped_between_two_words_is_told() -> None:
    """Its rank speaks and moves: whoever stops it lets it go again before it is silent for long."""
    told: list[ProcessItem] = []
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            ranks = Ranks(told.append)
            looks(ranks, process.pid)
            assert told == []
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            looks(ranks, process.pid)
            assert [(item["rank"], item["state"], item["pid"]) for item in told] == [(3, "stopped", process.pid)]
        finally:
            process.kill()


@pytest.mark.usefixtures("uncrowded")
def test_a_process_that_is_stopped_and_let_go_between_two_looks_is_told_once() -> None:
    told: list[ProcessItem] = []
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            ranks = Ranks(told.append)
            looks(ranks, process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            asyncio.run(ranks.glance())
            os.kill(process.pid, signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            looks(ranks, process.pid)
            assert [item["state"] for item in told] == ["stopped"]
            assert ranks._ranks[3].was_stopped is False
        finally:
            process.kill()


def test_who_speaks_while_another_s_stack_is_read_was_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes seconds where a machine is busy; a silence below zero would break the contract."""
    told: list[ProcessItem] = []
    now = [100.0]
    monkeypatch.setattr("workers.host.supervisor.ranks.time.monotonic", lambda: now[0])
    with contextlib.ExitStack() as stack:
        pids = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(process.kill)
            pids.append(process.pid)
        ranks = Ranks(told.append)

        async def slow(pid: int) -> list[str]:
            now[0] += 4.0
            ranks.heard(1, pids[1])
            os.kill(pids[1], signal.SIGSTOP)  # so that it is told
            os.waitid(os.P_PID, pids[1], os.WSTOPPED | os.WNOWAIT)
            return [f"a.py:1 in f{pid}"]

        monkeypatch.setattr("workers.host.supervisor.ranks.stack_of", slow)

        async def looks() -> None:
            for rank, pid in enumerate(pids):
                ranks.heard(rank, pid)
            await ranks.look()
            now[0] += 5.0
            ranks.heard(1, pids[1])
            await ranks.look()

        asyncio.run(looks())
    silent = {item["rank"]: item["silent_s"] for item in told}
    assert silent == {0: 9.0, 1: 0.0}


def test_a_process_that_others_leave_no_processor_is_told() -> None:
    """Two that never rest, on one processor: each waits for half of the time. One that sleeps waits for none."""
    told: list[ProcessItem] = []
    one = min(os.sched_getaffinity(0))
    spin = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{one}])\nwhile True: pass"]
    with contextlib.ExitStack() as stack:
        pids = []
        for argv in (spin, spin, ["sleep", "60"]):
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
            pids.append(process.pid)
        ranks = Ranks(told.append)

        async def looks() -> None:
            for _ in range(2):
                for rank, pid in enumerate(pids):
                    ranks.heard(rank, pid)
                await ranks.look()
                await asyncio.sleep(1.0)

        asyncio.run(looks())
    assert {item["rank"] for item in told} == {0, 1}
    assert all(0.2 < item["crowded"] <= 1.0 for item in told), told


def test_the_main_thread_s_frames_are_told_outermost_first() -> None:
    frames = [{"filename": f"{i}.py", "name": f"f{i}", "line": i} for i in range(100)]
    threads = [{"thread_name": "other", "frames": []}, {"thread_name": "MainThread", "frames": frames}]
    stack = main_stack(json.dumps(threads).encode())
    assert len(stack) == MOST_FRAMES
    assert (stack[0], stack[-1]) == (f"{MOST_FRAMES - 1}.py:{MOST_FRAMES - 1} in f{MOST_FRAMES - 1}", "0.py:0 in f0")


@pytest.mark.parametrize("told", [b"", b"[]", b"{}", b"[1]", b'[{"thread_name": "x"}]', b"\xff", b'[{"thread_name":'])
def test_what_is_no_stack_is_none(told: bytes) -> None:
    with pytest.raises(CannotReadError):
        main_stack(told)


class Clocked(FakeNvml):
    NVML_CLOCK_SM = 1

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if handle:
            raise self.NVMLError
        return 1980


def test_each_rank_is_told_of_its_own_gpu_and_the_host_of_its_network(tmp_path: Path) -> None:
    gauge = HostGauge(slots_of(range(4, 6), [1, 0]), with_gpus=True)
    gauge._gpus = Gpus(Clocked(), tmp_path)
    host, second, first = gauge.look()
    assert host["rank"] == -1
    assert "sent_bytes_s" not in host, "there was no look before"
    assert (first["rank"], first["gpu_percent"], first["gpu_clock_mhz"]) == (5, 97.0, 1980.0)
    assert second["rank"] == 4
    assert "gpu_clock_mhz" not in second
    host, *_ = gauge.look()
    assert host["sent_bytes_s"] >= 0
    assert host["received_bytes_s"] >= 0
    assert HostGauge({}, with_gpus=False).look()[1:] == []
