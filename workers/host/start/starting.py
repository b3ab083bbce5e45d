"""An order is carried out, or told as failed: whatever this machine refuses, nobody waits for it in vain."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

from contracts.control import LaunchOrder
from workers.disk import format_start_failure
from workers.host.apart.isolation import as_environment
from workers.host.attempts import AttemptDir, attempt_dir
from workers.host.ends import Ends
from workers.host.settings import HostSettings
from workers.host.start.claims import claim

log = logging.getLogger(__name__)


class Starter:
    """Starts supervisors. For use by several threads."""

    def __init__(self, settings: HostSettings, ends: Ends) -> None:
        self._settings, self._ends = settings, ends
        self._one_at_a_time = threading.Lock()

    def start(self, order: LaunchOrder) -> None:
        """Start the supervisor of an attempt, once however often it is ordered, and not after it was told as failed."""
        attempt = attempt_dir(self._settings.run_dir, order["job"], order["attempt"])
        with self._one_at_a_time:  # or one delivery tells of a failure while the next one starts it
            if self._ends.keeps(attempt):
                return
            try:
                claimed = claim(self._settings.run_dir, order)
            except OSError as error:
                if os.path.lexists(attempt.own):
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
        """--fork detaches: the supervisor is nobody's child and in nobody's group."""
        identity = [str(attempt.run_dir), attempt.job, str(attempt.attempt)]
        with attempt.supervisor_log.open("ab") as out:
            subprocess.run(
                ["setsid", "--fork", sys.executable, "-m", "workers.host.supervisor", *identity],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=os.getcwd(),
                env=os.environ | as_environment(self._settings),
                check=True,
            )

    def _fail(self, attempt: AttemptDir, error: Exception) -> None:
        log.error("cannot start %s/%s: %s", attempt.job, attempt.attempt, error)
        reason = format_start_failure(self._settings.name, error, self._settings.run_dir)
        self._ends.conclude(attempt, "failed", reason)
