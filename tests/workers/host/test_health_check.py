"""Health checks of a host, and failures that count as failures of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import mount_full_disk
from workers.host.attempt_watcher import AttemptStarter, HostExits
from workers.host.health_check import HealthCheck
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
