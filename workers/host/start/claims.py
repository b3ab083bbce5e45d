"""An order becomes one attempt on disk, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.control import LaunchOrder
from workers.host.attempts import OWN_TREE, AttemptDir, attempt_dir, attempts, report_of_host
from workers.host.files import BadFileError, read_json, write_json

NEWEST = "newest"  # in a job's folder: the highest attempt whose directories were pruned


def claim(run_dir: Path, order: LaunchOrder) -> AttemptDir | None:
    """Make the directories of an order. None when there is nothing to start: it was claimed before, a later attempt
    was, or a slot of it is still in use, of which the attempt then has a report.

    Raises:
        OSError: the disk takes no claim; nothing is left of it.
    """
    with claiming(run_dir):
        target = attempt_dir(run_dir, order["job"], order["attempt"])
        own_of_job = target.own.parent
        own_of_job.mkdir(mode=0o700, exist_ok=True)
        known = [int(path.name) for path in own_of_job.iterdir() if path.name.isdigit()]
        if target.attempt <= max([*known, newest_pruned(own_of_job)]):
            return None
        in_the_way = _slot_in_use(run_dir, order)
        # Made aside and renamed: a worker killed halfway leaves no claim, and the order is carried out when it returns.
        draft = Path(tempfile.mkdtemp(prefix=".claim-", dir=own_of_job))
        try:
            _give(target, order["spec"])
            write_json(draft / target.order.name, order)
            if in_the_way:
                # Failed, not lost: nobody needs to wonder how it ended, for it never ran.
                write_json(draft / target.exit.name, report_of_host(target, "failed", in_the_way))
            draft.rename(target.own)
        except OSError:
            for folder in (draft, target.given):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return None if in_the_way else target


@contextlib.contextmanager
def claiming(run_dir: Path) -> Iterator[None]:
    """One at a time on this host, whatever thread or worker it is of."""
    (run_dir / OWN_TREE).mkdir(mode=0o700, parents=True, exist_ok=True)
    readable = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC  # a disk that is read-only now still locks
    with open(os.open(run_dir / OWN_TREE / "lock", readable, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def newest_pruned(own_of_job: Path) -> int:
    """The highest attempt of a job that is no longer on disk, 0 when none is known."""
    with contextlib.suppress(BadFileError):
        number = read_json(own_of_job / NEWEST)
        return number if isinstance(number, int) else 0
    return 0


def _slot_in_use(run_dir: Path, order: LaunchOrder) -> str:
    """Which living attempt holds a slot that the order names; empty when none does."""
    for other in attempts(run_dir):
        with contextlib.suppress(BadFileError):  # who cannot be read is buried by the reporter, not waited for
            shared = sorted(set(order["slots"]) & set(other.read_order()["slots"]))
            if shared and other.read_exit() is None:
                slots = ", ".join(map(str, shared))
                return f"not started: attempt {other.attempt} of job {other.job} still uses slot {slots} of this host"
    return ""


def _give(attempt: AttemptDir, spec: dict[str, Any]) -> None:
    """The job's tree: others than its owner may pass through, and read nothing but the spec."""
    shutil.rmtree(attempt.given, ignore_errors=True)  # of a claim that was cut off
    for folder in (attempt.run_dir, attempt.given.parent, attempt.given):
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    for folder in (attempt.logs, attempt.work, attempt.temporary):
        folder.mkdir(mode=0o700)
    write_json(attempt.spec, spec)
    attempt.spec.chmod(0o644)
