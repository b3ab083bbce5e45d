"""Limits of a job: control groups in a folder that stands for the kernel's, and measurements of real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from workers.host import job_limits
from workers.host.attempts import get_attempt_dir
from workers.host.job_limits import ControlGroups, JobLimits, UnavailableError, set_up_limits
from workers.host.settings import USER_PER_OWNER, HostSettingError, HostSettings

MIB = 2**20
SLEEPING_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


@pytest.fixture
def settings(tmp_path: Path) -> HostSettings:
    folders = dict.fromkeys(("run_dir", "data_root", "checkpoint_root", "script_root"), tmp_path / "runs")
    return HostSettings("", "here", 4, "cpu", **folders, trainer_module="workers.trainer", job_processes=100)


def build_limits(settings: HostSettings, *, has_own_user: bool = False) -> JobLimits:
    return JobLimits(get_attempt_dir(settings.run_dir, "job", 1), settings, has_own_user=has_own_user)


def write_tree(root: Path, lines: list[str], files: dict[str, str]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup and files of the kernel's groups. Return both roots."""
    proc, groups = root / "proc", root / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("\n".join(lines))
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    return proc, groups


def test_version_2_limits_memory_cpus_and_processes_in_one_group(tmp_path: Path, settings: HostSettings) -> None:
    unit = "system.slice/host.service"
    tree = write_tree(
        tmp_path,
        [f"0::/{unit}/meshboard-worker"],
        {
            f"{unit}/cgroup.controllers": "cpu memory pids",
            f"{unit}/cgroup.subtree_control": "cpu memory pids",
            f"{unit}/meshboard-worker/cgroup.controllers": "cpu memory pids",
        },
    )
    groups = ControlGroups("job-1", replace(settings, job_memory_bytes=512 * MIB, job_cpus=2), *tree)
    groups.create()
    folder = tree[1] / unit / "job-1"
    assert set(groups.folders.values()) == {folder}
    result = {name: (folder / name).read_text() for name in ("memory.max", "cpu.max", "pids.max")}
    assert result == {"memory.max": "536870912", "cpu.max": "200000 100000", "pids.max": "100"}
    assert not groups.has_reached("memory")
    (folder / "memory.events").write_text("low 0\nmax 8\noom 0\noom_kill 1\n")
    assert not groups.has_reached("memory"), "the machine is out of memory, not the job"
    (folder / "memory.events").write_text("low 0\nmax 8\noom 1\noom_kill 1\n")
    assert groups.has_reached("memory")
    assert not groups.has_reached("processes")
    (folder / "pids.events").write_text("max 3\n")
    assert groups.has_reached("processes")
    groups.enter()
    assert (folder / "cgroup.procs").read_text() == "0"


def test_version_2_does_not_change_a_group_that_systemd_manages(tmp_path: Path, settings: HostSettings) -> None:
    tree = write_tree(tmp_path, ["0::/user.slice"], {"user.slice/cgroup.controllers": "cpu memory pids"})
    with pytest.raises(UnavailableError, match=r"/user\.slice of the host worker is not named meshboard-worker"):
        ControlGroups("job-1", settings, *tree).create()
    assert [path.name for path in (tree[1] / "user.slice").iterdir()] == ["cgroup.controllers"]


def test_version_1_has_one_group_per_controller(tmp_path: Path, settings: HostSettings) -> None:
    lines = ["4:memory:/box", "3:cpu:/box", "2:pids:/gone", "0::/"]
    tree = write_tree(tmp_path, lines, {"memory/box/tasks": "", "cpu/box/tasks": "", "pids/tasks": ""})
    groups = ControlGroups("job-1", replace(settings, job_memory_bytes=512 * MIB, job_cpus=1), *tree)
    groups.create()
    root = tree[1]
    expected = {"memory": root / "memory/box/job-1", "cpu": root / "cpu/box/job-1", "pids": root / "pids/job-1"}
    assert groups.folders == expected, "a container sees its own group as the root"
    assert (expected["memory"] / "memory.limit_in_bytes").read_text() == "536870912"
    assert (expected["cpu"] / "cpu.cfs_quota_us").read_text() == "100000"
    (expected["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (expected["memory"] / "memory.failcnt").write_text("0\n")
    assert not groups.has_reached("memory"), "the machine is out of memory, not the job"
    (expected["memory"] / "memory.failcnt").write_text("7\n")
    assert groups.has_reached("memory")


def test_host_lists_limits_and_refuses_to_start_without_required_groups(tmp_path: Path, settings: HostSettings) -> None:
    tree = write_tree(tmp_path, ["0::/"], {})
    limited = replace(settings, job_memory_bytes=3 * 2**29, job_disk_bytes=2**33, job_cpus=2)
    limited = replace(limited, job_open_files=50, job_user=USER_PER_OWNER)
    assert set_up_limits(limited, *tree) == (
        "1.5 GiB of memory (measured every 0.5 s); 2 CPUs (not enforced); "
        "100 processes and threads (measured every 0.5 s, and per job owner by the kernel); "
        "50 open files per process (rlimit); 8 GiB of disk space (measured every 5 s). "
        "No control groups: the kernel has no controller memory here"
    )
    assert set_up_limits(replace(settings, job_processes=0), *tree) == "none"
    with pytest.raises(HostSettingError, match="MESHBOARD_CONTROL_GROUPS is required, but"):
        set_up_limits(replace(limited, control_groups="required"), *tree)
    limits = build_limits(replace(limited, control_groups="required"))
    limits._groups = ControlGroups("job-1", limited, *tree)
    with pytest.raises(OSError, match="no control groups"):
        limits.prepare()


def test_start_removes_old_groups_of_all_host_workers(tmp_path: Path) -> None:
    prefix = job_limits._build_group_prefix(tmp_path)
    names = ["trial", f"{prefix}-job-1", "meshboard-job-00000000-old-1", "meshboard-job-00000000-new-1", "other-old"]
    for name in names:
        (tmp_path / name).mkdir()
        if name.endswith(("old-1", "other-old")):
            os.utime(tmp_path / name, (0, 0))
    job_limits._remove_old_groups({"pids": tmp_path / "trial"}, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"trial", "meshboard-job-00000000-new-1", "other-old"}


@pytest.fixture
def parent_pid() -> Iterator[int]:
    """Return a process that has one child."""
    with subprocess.Popen([sys.executable, "-c", SLEEPING_CHILD], start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text().strip(), "the child runs")
        yield process.pid
        os.killpg(process.pid, 9)


def test_measures_memory_and_processes_without_groups(settings: HostSettings, parent_pid: int) -> None:
    off = replace(settings, control_groups="off")
    cases = {
        "": replace(off, job_processes=2, job_memory_bytes=500 * MIB),
        "The job reached its limit of 1 processes and threads on here (MESHBOARD_JOB_PROCESSES of the host). Start "
        "fewer processes, or ask the admin of the host to raise the limit.": replace(off, job_processes=1),
        "The job reached its limit of 1,048,576 bytes of memory on here (MESHBOARD_JOB_MEMORY_BYTES of the host). Use "
        "less memory per rank, or ask the admin of the host to raise the limit.": replace(off, job_memory_bytes=MIB),
    }
    for excess, limited in cases.items():
        limits = build_limits(limited)
        limits.prepare()
        assert limits.find_excess(parent_pid) == excess
        assert limits.find_excess(parent_pid) == "", "the next measurement waits, because a measurement costs time"
    assert limits.find_excess(None) == "", "all processes have ended"


def test_limits_open_files_and_explains_the_error(settings: HostSettings) -> None:
    limits = build_limits(replace(settings, control_groups="off", job_processes=0, job_open_files=50))
    script = (
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)); [open('/dev/null') for _ in range(50)]"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limits.enter)
    assert result.stdout == "(50, 50)\n"
    assert limits.explain_error(result.stderr).startswith("A process of the job reached its limit of 50 open files on")
    assert limits.explain_error("ValueError: wrong") == ""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 50


def test_kernel_limits_the_user_of_a_job_owner(settings: HostSettings) -> None:
    limits = build_limits(replace(settings, control_groups="off", job_processes=77), has_own_user=True)
    limits.prepare()
    script = (
        "import resource; print(resource.getrlimit(resource.RLIMIT_NPROC), open('/proc/self/oom_score_adj').read())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=limits.enter
    )
    assert result.stdout.split("\n")[0] == "(77, 77) 500"
    error = "BlockingIOError: [Errno 11] Resource temporarily unavailable"
    assert limits.explain_error(error).startswith("The job reached its limit of 77 processes and threads")
    assert build_limits(settings).explain_error(error) == ""
