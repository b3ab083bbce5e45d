"""Forgets attempts that the controller has taken note of, once they are old or take too much room."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

from workers.host.attempts import OWN_TREE, AttemptDir, kept
from workers.host.files import discard, write_json
from workers.host.settings import HostSettings
from workers.host.start.claims import NEWEST, claiming, newest_pruned

log = logging.getLogger(__name__)

EVERY_S = 60.0
MEMORY_S = 30 * 86400.0  # how long a pruned job's attempt number is remembered: no order is valid nearly so long
DRAFT_S = 3600.0  # a claim that was cut off


class Pruner:
    """A thread of its own: removing gigabytes must not hold up a heartbeat."""

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
                prune(self._settings.run_dir, self._settings.keep_runs_s, self._settings.keep_runs_bytes)
            except Exception:
                log.exception("cannot prune the run directory")
            self._stopped.wait(EVERY_S)


class _Done(NamedTuple):
    acknowledged: float
    attempt: AttemptDir
    num_bytes: int


def prune(run_dir: Path, keep_s: float, keep_bytes: int) -> list[AttemptDir]:
    """Remove acknowledged attempts older than `keep_s`, then the oldest until the rest takes at most `keep_bytes`.
    Never one that lives or was not acknowledged. Returns what was removed."""
    done = []
    for attempt in kept(run_dir):
        with contextlib.suppress(FileNotFoundError):
            acknowledged = attempt.acknowledged.stat().st_mtime
            done.append(_Done(acknowledged, attempt, _bytes_below(attempt.own) + _bytes_below(attempt.given)))
    removed, left = [], sum(one.num_bytes for one in done)
    for one in sorted(done):
        if time.time() - one.acknowledged <= keep_s and left <= keep_bytes:
            break
        try:
            _remove(one.attempt)
        except OSError:
            log.exception("cannot remove %s/%s", one.attempt.job, one.attempt.attempt)
            continue
        left -= one.num_bytes
        removed.append(one.attempt)
    _forget(run_dir)
    return removed


def _remove(attempt: AttemptDir) -> None:
    """The host's own tree last: cut off before, it is tried again."""
    discard(attempt.given)
    with claiming(attempt.run_dir):
        own_of_job = attempt.own.parent
        write_json(own_of_job / NEWEST, max(newest_pruned(own_of_job), attempt.attempt))
        shutil.rmtree(attempt.own)
        with contextlib.suppress(OSError):  # another attempt of the job is still there
            attempt.given.parent.rmdir()


def _forget(run_dir: Path) -> None:
    """Numbers of jobs long gone, and claims that were cut off."""
    now = time.time()
    with claiming(run_dir):
        for own_of_job in (run_dir / OWN_TREE).glob("*/"):
            for draft in own_of_job.glob(".claim-*"):
                if now - draft.stat().st_mtime > DRAFT_S:
                    discard(draft)
            memory = own_of_job / NEWEST
            if memory.exists() and now - memory.stat().st_mtime > MEMORY_S and len(list(own_of_job.iterdir())) == 1:
                shutil.rmtree(own_of_job)


def _bytes_below(folder: Path) -> int:
    """What it takes on disk; files that vanish meanwhile do not count."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
