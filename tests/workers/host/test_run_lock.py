"""The lock of a run directory, and the replicas that share a state directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, base_environment, scale_timeout
from workers.host.run_lock import LOCK_VARIABLE, keep_lock, lock_replica, lock_run_dir, pass_lock
from workers.host.settings import HostSettingError, HostSettings, read_host_settings

TEMPLATE = "host-%n"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSettings:
    monkeypatch.delenv("MESHBOARD_RUN_DIR", raising=False)
    monkeypatch.setenv("MESHBOARD_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MESHBOARD_HOST_NAME", TEMPLATE)
    monkeypatch.setenv("MESHBOARD_DEVICE", "cpu")
    return read_host_settings(joined=False)


@pytest.fixture
def locks() -> Iterator[list[int]]:
    held: list[int] = []
    yield held
    for descriptor in held:
        os.close(descriptor)


def test_run_directory_belongs_to_one_worker(settings: HostSettings, locks: list[int]) -> None:
    locks.append(lock_run_dir(settings))
    named = rf"^MESHBOARD_RUN_DIR is {settings.run_dir}, but the host worker host-1 \(PID {os.getpid()} on the machine "
    with pytest.raises(HostSettingError, match=named):
        lock_run_dir(settings, max_wait_s=0)
    os.close(locks.pop())
    locks.append(lock_run_dir(settings, max_wait_s=0))


def test_replicas_get_separate_names_and_run_directories(
    settings: HostSettings, locks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = []
    for machine in ("first", "second"):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        lock, replica = lock_replica(settings, TEMPLATE)
        locks.append(lock)
        replicas.append(replica)
        # The doctor in the container of a replica reads the settings of this replica.
        assert read_host_settings(joined=False) == replica
    first, second = replicas
    assert (first.name, second.name) == ("host-1", "host-2")
    assert second.run_dir == first.run_dir.with_name("runs-2")
    os.close(locks.pop(0))
    lock, again = lock_replica(settings, TEMPLATE)
    locks.append(lock)
    assert again.name == "host-1", "the next worker gets the free number"


REPLACED = """
import os, sys
from workers.host.run_lock import keep_lock, lock_run_dir, pass_lock
from workers.host.settings import HostSettingError, read_host_settings
if sys.argv[1:] == ["worker"]:
    settings = read_host_settings(joined=False)
    keep_lock(settings)
    try:
        lock_run_dir(settings, max_wait_s=0)
    except HostSettingError:
        print("locked")
    sys.exit()
lock = lock_run_dir(read_host_settings(joined=False))
os.execve(sys.executable, [sys.executable, __file__, "worker"], os.environ | pass_lock(lock))
"""


def test_lock_stays_when_the_worker_replaces_the_process(settings: HostSettings, tmp_path: Path) -> None:
    script = tmp_path / "replaced.py"
    script.write_text(REPLACED)
    environment = {**base_environment(), "PYTHONPATH": str(ROOT), "MESHBOARD_STATE_DIR": str(tmp_path)}
    argv = [sys.executable, str(script)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=scale_timeout(60), check=True)
    assert done.stdout == "locked\n"


def test_supervisors_do_not_inherit_the_lock(
    settings: HostSettings, locks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in pass_lock(lock_run_dir(settings)).items():
        monkeypatch.setenv(name, value)
    locks.append(keep_lock(settings))
    assert LOCK_VARIABLE not in os.environ
    assert not os.get_inheritable(locks[0])


def test_names_a_run_directory_that_cannot_be_locked(settings: HostSettings, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(HostSettingError, match=r"^MESHBOARD_RUN_DIR is .*/runs, which cannot be locked: "):
        lock_run_dir(settings)
