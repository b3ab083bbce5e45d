"""Remove acknowledged attempts from disk when they are old or take too much space."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from workers.host.attempt_starter import NEWEST_FILE, lock_claims, read_newest_pruned
from workers.host.attempts import HOST_TREE, AttemptDir, iterate_attempts
from workers.host.files import remove_path, write_json
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

PRUNE_INTERVAL_S = 60.0
REMEMBER_PRUNED_S = 30 * 86400.0  # of a pruned attempt's number, which is longer than any order is valid
MAX_DRAFT_AGE_S = 3600.0  # of an interrupted claim


class Pruner:
    """Prune in a separate thread, because removing gigabytes must not delay a heartbeat."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-pruner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                prune_attempts(self._settings.run_dir, self._settings.keep_runs_s, self._settings.keep_runs_bytes)
            except Exception:
                log.exception("cannot prune the run directory")
            self._stopped.wait(PRUNE_INTERVAL_S)


class _Candidate(NamedTuple):
    acknowledged: float
    attempt: AttemptDir
    num_bytes: int


def prune_attempts(run_dir: Path, keep_s: float, keep_bytes: int) -> list[AttemptDir]:
    """Remove acknowledged attempts older than `keep_s`, then the oldest until the rest takes at most `keep_bytes`.

    Returns:
        The removed attempts. A living or unacknowledged attempt is never removed.
    """
    candidates = []
    for attempt in iterate_attempts(run_dir):
        with contextlib.suppress(FileNotFoundError):
            acknowledged = attempt.acknowledged_marker.stat().st_mtime
            num_bytes = _measure_bytes(attempt.host_dir) + _measure_bytes(attempt.job_dir)
            candidates.append(_Candidate(acknowledged, attempt, num_bytes))
    removed, left_bytes = [], sum(candidate.num_bytes for candidate in candidates)
    for acknowledged, attempt, num_bytes in sorted(candidates):
        if time.time() - acknowledged <= keep_s and left_bytes <= keep_bytes:
            break
        try:
            _remove(attempt)
        except OSError:
            log.exception("cannot remove %s/%s", attempt.job, attempt.attempt)
            continue
        left_bytes -= num_bytes
        removed.append(attempt)
    _remove_leftovers(run_dir)
    return removed


def _remove(attempt: AttemptDir) -> None:
    """Remove both trees of an attempt. The host's tree is last, so an interrupted removal is repeated."""
    remove_path(attempt.job_dir)
    with lock_claims(attempt.run_dir):
        job_host_dir = attempt.host_dir.parent
        write_json(job_host_dir / NEWEST_FILE, max(read_newest_pruned(job_host_dir), attempt.attempt))
        shutil.rmtree(attempt.host_dir)
        with contextlib.suppress(OSError):  # the job has another attempt
            attempt.job_dir.parent.rmdir()


def _remove_leftovers(run_dir: Path) -> None:
    """Remove interrupted claims, and the attempt numbers of old jobs."""
    now = time.time()
    with lock_claims(run_dir):
        for job_host_dir in (run_dir / HOST_TREE).glob("*/"):
            for draft in job_host_dir.glob(".claim-*"):
                if now - draft.stat().st_mtime > MAX_DRAFT_AGE_S:
                    remove_path(draft)
            newest = job_host_dir / NEWEST_FILE
            is_old = newest.exists() and now - newest.stat().st_mtime > REMEMBER_PRUNED_S
            if is_old and len(list(job_host_dir.iterdir())) == 1:
                shutil.rmtree(job_host_dir)


def _measure_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on disk, without files that vanish during the walk."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
