"""Out-of-memory kills of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from workers.host.supervisor.memory_kills import CGROUP_ROOT, MemoryKillWatch

MISSING = Path("/nonexistent")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return the folder of a machine whose kernel has counted 3 out-of-memory kills."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 3\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 9\noom_kill 2\n")
    (tmp_path / "job" / "memory.max").write_text(f"{16 * 2**30}\n")
    (tmp_path / "job" / "memory.peak").write_text(f"{16 * 2**30}\n")
    return tmp_path


def test_counts_kills_in_the_cgroup_of_the_job(files: Path) -> None:
    watch = MemoryKillWatch(files, files, MISSING)
    (files / "vmstat").write_text("pgfault 1\noom_kill 4\n")
    expected = "cgroup of the job, whose memory limit is 16.0 GiB and whose peak is 16.0 GiB."
    text = f"The kernel counted no out-of-memory kill in the {expected}"
    assert watch.describe(1) == {"oom_kills": 0, "text": text}, "the kernel ended a process outside of the job"
    (files / "job" / "memory.events").write_text("low 0\noom 9\noom_kill 3\n")
    text = f"The kernel counted 1 out-of-memory kill in the {expected}"
    assert watch.describe(1) == {"oom_kills": 1, "text": text}


def test_counts_kills_on_a_host_without_the_cgroup(files: Path) -> None:
    watch = MemoryKillWatch(files, MISSING, MISSING)
    text = "The kernel counted no out-of-memory kill on the host during this attempt."
    assert watch.describe(1) == {"oom_kills": 0, "text": text}
    (files / "vmstat").write_text("oom_kill 5\n")
    text = "The kernel counted 2 out-of-memory kills on the host during this attempt."
    assert watch.describe(1) == {"oom_kills": 2, "text": text}


def test_number_of_kills_is_unknown_without_a_counter() -> None:
    evidence = MemoryKillWatch(MISSING, MISSING, MISSING).describe(1)
    assert evidence["oom_kills"] is None
    assert evidence["text"] == "The host cannot read how many processes the kernel's out-of-memory killer ended."


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Return a cgroup with a memory limit of 64 MiB."""
    is_v2 = (CGROUP_ROOT / "cgroup.controllers").exists()
    folder = (CGROUP_ROOT if is_v2 else CGROUP_ROOT / "memory") / f"meshboard-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(64 * 2**20))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"this machine does not allow memory cgroups: {error}")
    yield folder

    def remove() -> bool:
        with suppress(OSError):  # the kernel still accounts for the ended process
            folder.rmdir()
        return not folder.exists()

    wait_until(remove, "the cgroup is empty")


EATER = """
import sys
open(sys.argv[1], "w").write("0")
held = bytearray(512 * 2**20)
"""


def test_recognizes_a_process_that_the_kernel_ended(small_cgroup: Path) -> None:
    watch = MemoryKillWatch()
    time.sleep(0.01)  # the kernel's log has a resolution of microseconds
    eater = subprocess.Popen([sys.executable, "-c", EATER, str(small_cgroup / "cgroup.procs")])
    assert eater.wait() == -9
    evidence = watch.describe(eater.pid)
    assert evidence["oom_kills"] == 1
    assert "out-of-memory kill" in evidence["text"]
