"""Reserve a run directory for one host worker, and number the workers that share a folder, such as replicas.

The lock is a file lock, which the kernel releases when the worker ends. It stays held when `workers.host.join` replaces
itself by the Celery worker, so a second worker never sees the directory unlocked in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from workers.host.attempts import HOST_TREE
from workers.host.settings import (
    HostSettingError,
    HostSettings,
    Replica,
    get_replica,
    get_worker_file,
    read_run_dir,
)

LOCK_FILE = "worker.lock"
LOCK_VARIABLE = "MESHBOARD_RUN_LOCK"  # descriptor of the lock, from `workers.host.join` to the Celery worker
MAX_LOCK_WAIT_S = 10.0  # for a previous worker that is ending
RETRY_INTERVAL_S = 0.1
MAX_REPLICAS = 1000


def lock_run_dir(settings: HostSettings, max_wait_s: float = MAX_LOCK_WAIT_S) -> int:
    """Lock the run directory until this process ends. Return the descriptor. Raises HostSettingError."""
    deadline = time.monotonic() + max_wait_s
    while (descriptor := _try_lock(settings.run_dir)) is None:
        if time.monotonic() > deadline:
            raise HostSettingError(
                f"MESHBOARD_RUN_DIR is {settings.run_dir}, but {_describe_worker(settings.run_dir)} uses this folder. "
                "Stop the other host worker, or set another MESHBOARD_RUN_DIR and MESHBOARD_HOST_NAME."
            )
        time.sleep(RETRY_INTERVAL_S)
    _record_worker(Replica(settings.name, settings.run_dir))
    return descriptor


def lock_replica(settings: HostSettings, name: str) -> tuple[int, HostSettings]:
    """Lock the run directory of the lowest free number. Return the descriptor, and the settings of this replica.

    Args:
        name: the name of all replicas, with REPLICA_MARK for the number.

    Raises HostSettingError.
    """
    first_run_dir = read_run_dir(settings.state_dir)
    for number in range(1, MAX_REPLICAS + 1):
        replica = get_replica(name, first_run_dir, number)
        if (descriptor := _try_lock(replica.run_dir)) is not None:
            _record_worker(replica)
            return descriptor, replace(settings, name=replica.name, run_dir=replica.run_dir)
    raise HostSettingError(f"{MAX_REPLICAS} host workers share {first_run_dir}, which is the maximum.")


def keep_lock(settings: HostSettings) -> int:
    """Take over the lock of `workers.host.join`, or lock the run directory. Raises HostSettingError."""
    number = os.environ.pop(LOCK_VARIABLE, "")
    if not number.isdecimal():
        return lock_run_dir(settings)
    descriptor = int(number)
    os.set_inheritable(descriptor, False)  # a supervisor outlives the worker, and must not hold the lock
    return descriptor


def pass_lock(descriptor: int) -> dict[str, str]:
    """Let the program that replaces this process inherit the lock. Return its variable."""
    os.set_inheritable(descriptor, True)
    return {LOCK_VARIABLE: str(descriptor)}


def _try_lock(run_dir: Path) -> int | None:
    """Return the descriptor of the lock, or None if another worker holds the lock. Raises HostSettingError."""
    path = run_dir / HOST_TREE / LOCK_FILE
    try:
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Read-only, because a worker can start again on a disk that has become read-only.
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostSettingError(f"MESHBOARD_RUN_DIR is {run_dir}, which cannot be locked: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise HostSettingError(f"MESHBOARD_RUN_DIR is {run_dir}, which cannot be locked: {error.strerror}") from None
    return descriptor


def _record_worker(replica: Replica) -> None:
    """Name this worker for the message to another worker, and for the doctor of this replica."""
    with contextlib.suppress(OSError):
        text = json.dumps({"name": replica.name, "machine": socket.gethostname(), "pid": os.getpid()})
        get_worker_file(replica.run_dir).write_text(text)


def _describe_worker(run_dir: Path) -> str:
    try:
        found = json.loads(get_worker_file(run_dir).read_text())
        return f"the host worker {found['name']} (PID {found['pid']} on the machine {found['machine']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another host worker"
