"""Health checks of a host, and failures that count as failures of the host."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.control import LaunchOrder
from tests.support.host import build_launch_order
from tests.support.processes import mount_full_disk
from tests.workers.host.test_machine import FakeNvml
from workers.disk import write_json
from workers.host.attempt_watcher import AttemptStarter, HostExits
from workers.host.attempts import claim_attempt
from workers.host.hardware import Gpus
from workers.host.health_check import HealthCheck
from workers.host.job_disk import DiskWatch, get_disk_limit
from workers.host.processes import get_process_id
from workers.host.settings import HostSettings
from workers.host.supervisor.exit_report import find_rank_fault

MIN_FREE_BYTES = 2**19


def build_settings(folder: Path, device: str = "cpu") -> HostSettings:
    paths = (folder / "runs", folder, folder, folder)
    return HostSettings("", "here", 2, device, *paths, "workers.trainer", min_free_bytes=MIN_FREE_BYTES)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    with mount_full_disk(tmp_path / "disk") as disk:
        yield disk


def test_healthy_host_has_no_problem(tmp_path: Path) -> None:
    assert HealthCheck(build_settings(tmp_path)).find_problem() == ""


def test_full_disk_is_a_problem_until_space_is_freed(full: Path) -> None:
    (full / "filling").unlink()
    health = HealthCheck(build_settings(full))
    assert health.find_problem() == ""
    (full / "filling").write_bytes(bytes(3 * 2**18))
    needs = f"Jobs need at least {MIN_FREE_BYTES:,} (MESHBOARD_MIN_FREE_BYTES)."
    assert health.find_problem().endswith(needs)
    (full / "filling").unlink()
    assert health.find_problem() == ""


def test_full_disk_rejects_launches(full: Path) -> None:
    """The order leaves no files, and the report names the host as the cause."""
    exits, settings = HostExits(), build_settings(full)
    order: Any = {"job": "job", "attempt": 1, "spec": {}, "slots": [0]}
    AttemptStarter(settings, exits).start(order)
    (report,) = exits.get_reports().values()
    assert report["exit"]["host_fault"] == "launch"
    assert report["exit"]["reason"].startswith("Not started on here: The ")
    assert HealthCheck(settings).find_problem()


def test_temporary_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr("workers.host.health_check.get_socket_root", lambda: blocked)
    problem = HealthCheck(build_settings(tmp_path)).find_problem()
    assert problem.startswith(f"The temporary folder {blocked} is not writable")


def test_interpreter_must_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "does not start" in HealthCheck(build_settings(tmp_path)).find_problem()


def test_each_slot_needs_a_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.host.health_check.Gpus", lambda: ["gpu"])
    problem = HealthCheck(build_settings(tmp_path, "cuda")).find_problem()
    assert problem == "The driver shows 1 GPUs, but the host has 2."


@pytest.mark.parametrize(
    ("error", "has_steps", "fault"),
    [
        ("RuntimeError: No CUDA-capable device is detected", False, "ranks"),
        ("RuntimeError: No CUDA-capable device is detected", True, None),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", True, "ranks"),
        ("Bootstrap : no socket interface found", False, "ranks"),
        ("ValueError: boom", False, None),
        ("OSError: [Errno 28] No space left on device", False, None),
    ],
)
def test_log_of_ranks_shows_the_fault_of_the_host(error: str, has_steps: bool, fault: str | None) -> None:
    report: Any = {"reason": "rank 0 ended with exit code 1", "error": error}
    assert find_rank_fault(report, has_steps=has_steps) == fault


class BusyNvml(FakeNvml):
    """A replacement of pynvml whose GPUs have processes and clock limits."""

    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815 - a name of pynvml
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    def __init__(self, used_bytes: int | None = None, reasons: int = 1) -> None:
        self._used_bytes, self._reasons = used_bytes, reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=42, usedGpuMemory=self._used_bytes)] if handle == 1 else []

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._reasons


@pytest.mark.parametrize(
    ("nvml", "problem"),
    [
        (BusyNvml(), ""),
        (BusyNvml(2**30 - 1), ""),
        (BusyNvml(2 * 2**30), "Process 42 of another program uses 2,147,483,648 bytes of GPU 1."),
        (BusyNvml(reasons=0x40), "GPU 1 lowers its clock, because it is too hot."),
        (BusyNvml(reasons=0x80 | 0x1), "GPU 1 lowers its clock, because its power supply requests it."),
    ],
)
def test_gpus_of_a_launch_are_idle_and_at_full_clock(
    nvml: BusyNvml, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.host.health_check.Gpus", lambda: Gpus(nvml, tmp_path))
    monkeypatch.setattr("workers.host.health_check.IDLE_TIMEOUT_S", 0.0)
    health = HealthCheck(build_settings(tmp_path, "cuda"))
    assert health.find_order_problem(build_launch_order(slots=[1])) == problem
    assert health.find_order_problem(build_launch_order(slots=[0])) == problem.replace("GPU 1 l", "GPU 0 l") * (
        "Process" not in problem
    )
    assert HealthCheck(build_settings(tmp_path)).find_order_problem(build_launch_order(slots=[1])) == "", "no GPUs"


def build_limited_order(job: str, limit_bytes: int | None) -> LaunchOrder:
    order = build_launch_order(job)
    order["spec"] = {"name": job, "resources": {"disk_limit_bytes": limit_bytes}}
    return order


def test_launches_reserve_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running attempt reserves the part of its limit that it has not used."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=MIN_FREE_BYTES + 100 * 2**20))
    settings = build_settings(tmp_path)
    assert HealthCheck(settings).find_order_problem(build_limited_order("other", 101 * 2**20))
    assert HealthCheck(settings).find_order_problem(build_limited_order("other", 50 * 2**20)) == ""
    running = claim_attempt(settings.run_dir, build_limited_order("running", 80 * 2**20))
    assert running is not None
    write_json(running.pid_file, {**get_process_id(os.getpid())._asdict(), "folder": "x"})
    problem = HealthCheck(settings).find_order_problem(build_limited_order("other", 50 * 2**20))
    assert "has 104,857,600 bytes for jobs, of which running jobs reserve 83,886,080." in problem
    assert HealthCheck(settings).find_order_problem(build_limited_order("other", None)) == "", "reserves nothing"
    (running.work).mkdir(parents=True, exist_ok=True)
    (running.work / "data").write_bytes(bytes(40 * 2**20))
    assert DiskWatch(running, running.read_order(), settings).find_excess() == ""
    assert HealthCheck(settings).find_order_problem(build_limited_order("other", 50 * 2**20)) == ""


@pytest.mark.parametrize(("of_host", "of_spec", "limit"), [(0, None, 0), (5, None, 5), (5, 9, 5), (5, 3, 3), (0, 3, 3)])
def test_disk_limit_is_the_smaller_one(tmp_path: Path, of_host: int, of_spec: int | None, limit: int) -> None:
    settings = replace(build_settings(tmp_path), job_disk_bytes=of_host)
    assert get_disk_limit(build_limited_order("job", of_spec), settings) == limit


def test_disk_use_counts_deep_trees_and_checkpoints(tmp_path: Path) -> None:
    settings = replace(build_settings(tmp_path), checkpoint_root=tmp_path / "checkpoints")
    attempt = claim_attempt(settings.run_dir, build_limited_order("job", 3 * 2**20))
    assert attempt is not None
    here = os.getcwd()
    try:
        attempt.work.mkdir(parents=True, exist_ok=True)
        os.chdir(attempt.work)
        for _ in range(1500):
            os.mkdir("nested")
            os.chdir("nested")
        Path("deep").write_bytes(bytes(2**20))
    finally:
        os.chdir(here)
    watch = DiskWatch(attempt, attempt.read_order(), settings)
    used_bytes = watch._measure()
    assert used_bytes > 2**20
    folder = settings.checkpoint_root / "job" / "1"
    folder.mkdir(parents=True)
    (folder / "step").write_bytes(bytes(8 * 2**20))
    excess = watch.find_excess()
    assert re.fullmatch(
        r"The job used [\d,]+ bytes of disk on here\. The limit is 3,145,728 bytes "
        r"\(`resources.disk_limit_bytes`, or MESHBOARD_JOB_DISK_BYTES of the host\)\.",
        excess,
    )
    assert watch.find_excess() == "", "the next measurement waits, because a measurement costs time"
    subprocess.run(["rm", "-rf", str(attempt.work)], check=True)
