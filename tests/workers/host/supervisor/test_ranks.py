"""What a host sees of a process: quotas, GPUs, and what py-spy says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.workers.host.test_facts import FakeNvml
from workers.host.facts.gpus import Gpus
from workers.host.supervisor.gauges import HostGauge, slots_of
from workers.host.supervisor.ranks import MOST_FRAMES, CannotReadError, main_stack, throttled_s


def test_a_quota_of_the_group_or_of_one_above_it_counts(tmp_path: Path) -> None:
    own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()
    if not own:
        pytest.skip("no cgroup v2 here")
    group = tmp_path / own[0]
    group.mkdir(parents=True, exist_ok=True)
    pid = int(Path("/proc/self/stat").read_text().split()[0])
    assert throttled_s(pid, tmp_path) == 0
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 3\nthrottled_usec 2500000\n")
    assert throttled_s(pid, tmp_path) == 2.5
    (group / "cpu.stat").write_text("throttled_usec 7000000\n")
    assert throttled_s(pid, tmp_path) == 7.0
    (group / "cpu.stat").write_text("throttled_usec nonsense\n")
    assert throttled_s(pid, tmp_path) in (0, 2.5)


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
