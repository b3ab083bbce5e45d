"""Health of the host and of rank processes: CPU quotas, stacks, GPUs, and network."""

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

from contracts.telemetry.items import ProcessItem
from tests.workers.host.test_machine import FakeNvml
from workers.host.hardware import Gpus
from workers.host.supervisor import health as ranks_module
from workers.host.supervisor.health import (
    MAX_FRAMES,
    GaugeSampler,
    ProcessUsage,
    RankMonitor,
    StackUnavailableError,
    _select_interfaces,
    compute_rates,
    parse_main_stack,
    read_throttled_s,
)


@pytest.mark.parametrize(
    ("line", "below", "name", "units"),
    [
        ("0::/jobs/one", "", "throttled_usec", 1_000_000),
        ("1:cpu,cpuacct:/jobs/one", "cpu,cpuacct", "throttled_time", 1_000_000_000),
    ],
)
def test_counts_cpu_quotas_of_the_group_and_its_parents(
    tmp_path: Path, line: str, below: str, name: str, units: int
) -> None:
    groups, proc = tmp_path / "groups", tmp_path / "proc"
    top = groups / below
    own = top / "jobs" / "one"
    own.mkdir(parents=True)
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text(f"9:name=systemd:/\n2:memory:/jobs/one\n{line}\n")
    assert read_throttled_s(7, groups, proc) == 0
    (top / "cpu.stat").write_text(f"nr_periods 5\nnr_throttled 3\n{name} {5 * units // 2}\n")
    assert read_throttled_s(7, groups, proc) == 2.5
    (own / "cpu.stat").write_text(f"{name} {7 * units}\n")
    assert read_throttled_s(7, groups, proc) == 7.0
    (own / "cpu.stat").write_text(f"{name} nonsense\n")
    assert read_throttled_s(7, groups, proc) == 2.5
    assert read_throttled_s(8, groups, proc) == 0, "it is gone"


def test_limits_waiting_rates_to_one() -> None:
    before = ProcessUsage(5.0, 1.0, 2.0, {1: 3.0})
    assert compute_rates(before, ProcessUsage(7.0, 4.0, 6.5, {1: 4.0})) == (1.5, 1.0, 0.5)
    assert compute_rates(before, ProcessUsage(7.0, 0.0, 0.0, {})) == (0.0, 0.0, 0.0), "it is gone"


def test_counts_the_wait_of_the_main_thread_and_of_autograd() -> None:
    """The thread of autograd trains while the main thread waits for it. Helper threads are not counted twice."""
    before = ProcessUsage(5.0, 0.0, 0.0, {1: 3.0, 2: 1.0, 3: 7.0})
    after = ProcessUsage(7.0, 0.0, 0.0, {1: 3.2, 2: 1.4, 3: 7.1, 4: 0.1})
    assert compute_rates(before, after)[2] == pytest.approx((0.2 + 0.4) / 2)


@pytest.fixture
def uncrowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore waiting for a CPU, which a busy test machine causes."""
    monkeypatch.setattr(ranks_module, "MIN_CROWDED_FRACTION", math.inf)


def looks(ranks: RankMonitor, pid: int) -> None:
    """Check rank 3 repeatedly while its meter sends items."""

    async def work() -> None:
        for _ in range(3):
            ranks.record_contact(3, pid)
            await ranks.check()

    asyncio.run(work())


@pytest.mark.usefixtures("uncrowded")
def test_reports_a_process_stopped_between_two_messages() -> None:
    """Stop a process only for short times. Its rank is never silent for long."""
    result: list[ProcessItem] = []
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            ranks = RankMonitor(result.append)
            looks(ranks, process.pid)
            assert result == []
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            looks(ranks, process.pid)
            assert [(item["rank"], item["state"], item["pid"]) for item in result] == [(3, "stopped", process.pid)]
        finally:
            process.kill()


@pytest.mark.usefixtures("uncrowded")
def test_reports_a_process_that_ended_before_its_rank_is_silent_for_long() -> None:
    result: list[ProcessItem] = []
    with subprocess.Popen(["sleep", "60"]) as process:
        ranks = RankMonitor(result.append)
        looks(ranks, process.pid)
        assert result == []
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        looks(ranks, process.pid)
        assert [item["state"] for item in result] == ["zombie"]


@pytest.mark.usefixtures("uncrowded")
def test_reports_a_stop_between_two_checks_once() -> None:
    result: list[ProcessItem] = []
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            ranks = RankMonitor(result.append)
            looks(ranks, process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            asyncio.run(ranks.check_stopped())
            os.kill(process.pid, signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            looks(ranks, process.pid)
            assert [item["state"] for item in result] == ["stopped"]
            assert ranks._ranks[3].was_stopped is False
        finally:
            process.kill()


def test_silence_is_not_negative_after_a_slow_stack_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a rank that sends during a slow stack read has no negative silence."""
    result: list[ProcessItem] = []
    now = [100.0]
    monkeypatch.setattr("workers.host.supervisor.health.time.monotonic", lambda: now[0])
    with contextlib.ExitStack() as stack:
        pids = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(process.kill)
            pids.append(process.pid)
        ranks = RankMonitor(result.append)

        async def slow(pid: int) -> list[str]:
            now[0] += 4.0
            ranks.record_contact(1, pids[1])
            os.kill(pids[1], signal.SIGSTOP)  # report the stop
            os.waitid(os.P_PID, pids[1], os.WSTOPPED | os.WNOWAIT)
            return [f"a.py:1 in f{pid}"]

        monkeypatch.setattr("workers.host.supervisor.health.read_stack", slow)

        async def looks() -> None:
            for rank, pid in enumerate(pids):
                ranks.record_contact(rank, pid)
            await ranks.check()
            now[0] += 5.0
            ranks.record_contact(1, pids[1])
            await ranks.check()

        asyncio.run(looks())
    silent = {item["rank"]: item["silent_s"] for item in result}
    assert silent == {0: 9.0, 1: 0.0}


def test_reports_a_process_that_waits_for_a_cpu() -> None:
    """Run two busy processes on one CPU. Each waits half of the time, and a sleeping process never waits."""
    result: list[ProcessItem] = []
    one = min(os.sched_getaffinity(0))
    program = f"import os, threading\nos.sched_setaffinity(0, [{one}])\ndef work():\n  while True: pass\n"
    spin = [sys.executable, "-c", f"{program}work()"]
    # Another thread works, as that of autograd does.
    spin_in_thread = [sys.executable, "-c", f"{program}threading.Thread(target=work).start()"]
    with contextlib.ExitStack() as stack:
        pids = []
        for argv in (spin, spin_in_thread, ["sleep", "60"]):
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
            pids.append(process.pid)
        ranks = RankMonitor(result.append)

        async def looks() -> None:
            for _ in range(2):
                for rank, pid in enumerate(pids):
                    ranks.record_contact(rank, pid)
                await ranks.check()
                await asyncio.sleep(1.0)

        asyncio.run(looks())
    assert {item["rank"] for item in result} == {0, 1}
    assert all(0.2 < item["crowded"] <= 1.0 for item in result), result


def test_parses_main_thread_frames_outermost_first() -> None:
    frames = [{"filename": f"{i}.py", "name": f"f{i}", "line": i} for i in range(100)]
    threads = [{"thread_name": "other", "frames": []}, {"thread_name": "MainThread", "frames": frames}]
    stack = parse_main_stack(json.dumps(threads).encode())
    assert len(stack) == MAX_FRAMES
    assert (stack[0], stack[-1]) == (f"{MAX_FRAMES - 1}.py:{MAX_FRAMES - 1} in f{MAX_FRAMES - 1}", "0.py:0 in f0")


@pytest.mark.parametrize("result", [b"", b"[]", b"{}", b"[1]", b'[{"thread_name": "x"}]', b"\xff", b'[{"thread_name":'])
def test_rejects_output_without_a_stack(result: bytes) -> None:
    with pytest.raises(StackUnavailableError):
        parse_main_stack(result)


class Clocked(FakeNvml):
    NVML_CLOCK_SM = 1

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if handle:
            raise self.NVMLError
        return 1980


def test_samples_the_gpu_of_each_rank_and_the_host_network(tmp_path: Path) -> None:
    gauge = GaugeSampler({4: 1, 5: 0}, with_gpus=True)
    gauge._gpus = Gpus(Clocked(), tmp_path)
    host, second, first = gauge.sample()
    assert host["rank"] == -1
    assert "sent_bytes_s" not in host, "there was no look before"
    assert (first["rank"], first["gpu_percent"], first["gpu_clock_mhz"]) == (5, 97.0, 1980.0)
    assert second["rank"] == 4
    assert "gpu_clock_mhz" not in second
    host, *_ = gauge.sample()
    assert host["sent_bytes_s"] >= 0
    assert host["received_bytes_s"] >= 0
    assert GaugeSampler({}, with_gpus=False).sample()[1:] == []


def test_reports_cpu_usage_from_the_second_sample() -> None:
    """Check the first sample, because psutil counts per thread since the previous call."""
    gauge = GaugeSampler({}, with_gpus=False)
    (first,), (second,) = gauge.sample(), gauge.sample()
    assert "cpu" not in first
    assert "cpu" in second


def test_skips_bonds_bridges_and_vlans(tmp_path: Path) -> None:
    for name in ("eth0/device", "eth1/device", "bond0/lower_eth0", "bond0/lower_eth1", "eth0.7/lower_eth0", "veth1"):
        (tmp_path / name).mkdir(parents=True)
    names = ["lo", "eth0", "eth1", "bond0", "eth0.7", "veth1"]
    assert _select_interfaces(names, tmp_path) == ["eth0", "eth1"]
    assert _select_interfaces(["lo", "veth1"], tmp_path) == ["veth1"], "of a container, which has no hardware"
