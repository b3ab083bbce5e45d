"""Turn an order into an attempt: create its directories once, and start its supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.control import LaunchOrder
from workers.disk import format_start_failure
from workers.host.attempt_watcher import HostExits
from workers.host.attempts import HOST_TREE, AttemptDir, build_host_exit_report, get_attempt_dir, iterate_unacknowledged
from workers.host.files import BadFileError, read_json, write_json
from workers.host.isolation import get_isolation_variables
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

NEWEST_FILE = "newest"  # in a job's host folder: the highest pruned attempt


class AttemptStarter:
    """Start supervisors. Thread-safe."""

    def __init__(self, settings: HostSettings, exits: HostExits) -> None:
        self._settings, self._exits = settings, exits
        self._lock = threading.Lock()

    def start(self, order: LaunchOrder) -> None:
        """Start the supervisor of an attempt once, and not after the attempt was reported as failed."""
        attempt = get_attempt_dir(self._settings.run_dir, order["job"], order["attempt"])
        # Without the lock, one delivery of the order could report a failure while the next starts the attempt.
        with self._lock:
            if self._exits.is_pending(attempt):
                return
            try:
                claimed = claim_attempt(self._settings.run_dir, order)
            except OSError as error:
                if os.path.lexists(attempt.host_dir):
                    log.warning("%s/%s was already claimed: %s", attempt.job, attempt.attempt, error)
                else:
                    self._fail(attempt, error)
                return
            if claimed is None:
                return
            try:
                self._start_supervisor(claimed)
            except (OSError, subprocess.SubprocessError) as error:
                self._fail(claimed, error)

    def _start_supervisor(self, attempt: AttemptDir) -> None:
        # --fork detaches the supervisor from this process and its group.
        command = ["setsid", "--fork", sys.executable, "-m", "workers.host.supervisor"]
        with attempt.supervisor_log.open("ab") as out:
            subprocess.run(
                [*command, str(attempt.run_dir), attempt.job, str(attempt.attempt)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=os.getcwd(),
                env=os.environ | get_isolation_variables(self._settings),
                check=True,
            )

    def _fail(self, attempt: AttemptDir, error: Exception) -> None:
        log.error("cannot start %s/%s: %s", attempt.job, attempt.attempt, error)
        self._exits.record(attempt, "failed", format_start_failure(self._settings.name, error, self._settings.run_dir))


def claim_attempt(run_dir: Path, order: LaunchOrder) -> AttemptDir | None:
    """Create the directories of an order, or return None if there is nothing to start.

    Nothing starts if this or a later attempt was claimed before, or if a slot is in use. For a slot in use, the
    attempt gets an exit report.

    Raises:
        OSError: the disk rejects the files. The partial files are removed.
    """
    with lock_claims(run_dir):
        attempt = get_attempt_dir(run_dir, order["job"], order["attempt"])
        job_host_dir = attempt.host_dir.parent
        job_host_dir.mkdir(mode=0o700, exist_ok=True)
        known = [int(path.name) for path in job_host_dir.iterdir() if path.name.isdigit()]
        if attempt.attempt <= max([*known, read_newest_pruned(job_host_dir)]):
            return None
        conflict = _find_slot_in_use(run_dir, order)
        # Renamed when complete: after a crash no claim is left, and the order is executed when it is delivered again.
        draft = Path(tempfile.mkdtemp(prefix=".claim-", dir=job_host_dir))
        try:
            _create_job_dir(attempt, order["spec"])
            write_json(draft / attempt.order_file.name, order)
            if conflict:  # failed instead of lost, because it is certain that the attempt never ran
                write_json(draft / attempt.exit_file.name, build_host_exit_report(attempt, "failed", conflict))
            draft.rename(attempt.host_dir)
        except OSError:
            for folder in (draft, attempt.job_dir):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return None if conflict else attempt


@contextlib.contextmanager
def lock_claims(run_dir: Path) -> Iterator[None]:
    """Hold the lock of this run directory, which excludes all threads and host workers."""
    (run_dir / HOST_TREE).mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC  # also works after a disk becomes read-only
    with open(os.open(run_dir / HOST_TREE / "lock", flags, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_newest_pruned(job_host_dir: Path) -> int:
    """Return the highest attempt of a job that was pruned, or 0."""
    with contextlib.suppress(BadFileError):
        number = read_json(job_host_dir / NEWEST_FILE)
        return number if isinstance(number, int) else 0
    return 0


def _find_slot_in_use(run_dir: Path, order: LaunchOrder) -> str:
    """Describe the living attempt that uses a slot of the order. Empty if there is none."""
    for other in iterate_unacknowledged(run_dir):
        with contextlib.suppress(BadFileError):  # the watcher ends attempts with broken files
            shared = sorted(set(order["slots"]) & set(other.read_order()["slots"]))
            if shared and other.read_exit() is None:
                slots = ", ".join(map(str, shared))
                return f"not started: attempt {other.attempt} of job {other.job} still uses slot {slots} of this host"
    return ""


def _create_job_dir(attempt: AttemptDir, spec: dict[str, Any]) -> None:
    """Create the job's tree. Other users can pass through it, and can read only the spec."""
    shutil.rmtree(attempt.job_dir, ignore_errors=True)  # left by an interrupted claim
    for folder in (attempt.run_dir, attempt.job_dir.parent, attempt.job_dir):
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    for folder in (attempt.logs, attempt.work, attempt.tmp):
        folder.mkdir(mode=0o700)
    write_json(attempt.spec, spec)
    attempt.spec.chmod(0o644)
