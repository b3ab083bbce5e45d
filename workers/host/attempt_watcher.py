"""Start the attempts of this host, report lost supervisors, end stuck attempts, and note stopped processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import redis
from redis.exceptions import RedisError

from contracts.control import AttemptReport, HostFault, LaunchOrder, Outcome
from contracts.names import cancel_key
from contracts.traces import log_launch_order
from workers.disk import BadFileError, discard_path, format_start_failure, remove_path, write_json
from workers.host.attempts import (
    AttemptDir,
    build_host_exit_report,
    claim_attempt,
    clean_text,
    get_attempt_dir,
    iterate_unacknowledged,
)
from workers.host.health_check import HealthCheck
from workers.host.isolation import get_isolation_variables
from workers.host.processes import ProcessId, get_process_id, kill_processes, read_cookie
from workers.host.settings import HostSettings

log = logging.getLogger(__name__)

SUPERVISOR_START_TIMEOUT_S = 15.0  # from the order to the supervisor's process
# A supervisor needs 1 s to see the flag, 10 s of TERM, and a moment for KILL. With one check per second and the time
# to kill, an attempt whose supervisor does not respond is gone 15 s after the cancel flag is set.
CANCEL_TIMEOUT_S = 12.5
KILL_TIMEOUT_S = 1.5
KEEP_ACKNOWLEDGED_S = 600.0  # longer than any order is valid
STOPPED_STATES = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}
MAX_STOPPED_NAMED = 4


class _PendingExit(NamedTuple):
    report: AttemptReport
    acknowledged: float | None = None  # monotonic


class HostExits:
    """Exit reports that the host worker decides. Reports that a full disk rejects stay in memory. Thread-safe.

    A report in memory is lost with the worker. The controller then sends the order again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[AttemptDir, _PendingExit] = {}

    def record(self, attempt: AttemptDir, outcome: Outcome, reason: str, host_fault: HostFault | None = None) -> bool:
        """Write the exit report, or keep it in memory. The first report stays. Return whether to send a heartbeat."""
        with self._lock:
            pending = self._pending.get(attempt)
            if pending is None:
                report = build_host_exit_report(attempt, outcome, reason, host_fault)
            else:
                report = pending.report["exit"]
            try:
                write_json(attempt.exit_file, report)
            except OSError as error:
                if pending is not None:
                    return False
                problem = "%s/%s: cannot store the exit report on disk, so it stays in memory: %s"
                log.warning(problem, attempt.job, attempt.attempt, error)
                self._pending[attempt] = _PendingExit(
                    AttemptReport(job=attempt.job, attempt=attempt.attempt, state="exited", slots=[], exit=report)
                )
                return True
            self._pending.pop(attempt, None)
            return True

    def is_pending(self, attempt: AttemptDir) -> bool:
        """Return whether the exit report is only in memory."""
        return attempt in self._pending

    def acknowledge(self, attempt: AttemptDir) -> None:
        """Note that the controller has the report. It stays for a while, because its order can arrive again."""
        with self._lock:
            if (pending := self._pending.get(attempt)) is not None:
                self._pending[attempt] = pending._replace(acknowledged=time.monotonic())

    def get_reports(self) -> dict[AttemptDir, AttemptReport]:
        """Return the reports in memory. An acknowledged report contains only the state."""
        with self._lock:
            oldest = time.monotonic() - KEEP_ACKNOWLEDGED_S
            reports = {}
            for attempt, (report, acknowledged) in list(self._pending.items()):
                has_files = os.path.lexists(attempt.host_dir)
                if acknowledged is None:
                    reports[attempt] = report.copy()
                elif has_files:
                    reports[attempt] = AttemptReport(job=attempt.job, attempt=attempt.attempt, state="exited", slots=[])
                elif acknowledged < oldest:
                    del self._pending[attempt]
            return reports


class AttemptWatcher:
    """Check the attempts repeatedly. State between checks is in memory."""

    def __init__(self, run_dir: Path, client: redis.Redis, exits: HostExits | None = None) -> None:
        self._run_dir, self._redis, self._exits = run_dir, client, exits or HostExits()
        self._cancelled_since: dict[AttemptDir, float] = {}  # monotonic
        self._stopped_since: dict[ProcessId, float] = {}  # unix seconds

    def check(self) -> bool:
        """Check each attempt. A problem with one does not affect the others. Return whether to send a heartbeat."""
        living, changed = [], False
        for attempt in iterate_unacknowledged(self._run_dir):
            try:
                ended = self._report_lost_supervisor(attempt)
                changed = ended or changed
                if not (ended or attempt.exit_file.exists() or self._exits.is_pending(attempt)):
                    living.append(attempt)
            except Exception:
                log.exception("cannot check %s/%s", attempt.job, attempt.attempt)
        self._read_cancel_flags(living)
        notes = self._describe_stopped(living)
        for attempt in living:
            try:
                changed = self._end_stuck(attempt) or _write_note(attempt, notes.get(attempt, "")) or changed
            except Exception:
                log.exception("cannot check %s/%s", attempt.job, attempt.attempt)
        return changed

    def _report_lost_supervisor(self, attempt: AttemptDir) -> bool:
        """Write the exit report if the supervisor ended without a valid one. Return whether it was written."""
        # The order matters: a supervisor that is found dead has already written its report, if it ever will.
        is_alive = attempt.get_supervisor() is not None or _is_supervisor_starting(attempt)
        has_started = attempt.pid_file.exists()
        reason = "the supervisor ended without an exit report; its ranks were stopped"
        try:
            if attempt.read_exit() is not None:
                return False
        except BadFileError as error:
            log.warning("%s/%s: %s", attempt.job, attempt.attempt, error)
            remove_path(attempt.exit_file)
            reason = f"the supervisor ended, and its report cannot be read: {error}"
        if is_alive:
            return False
        if not has_started:
            return self._end(attempt, "failed", "the supervisor did not start", "launch")
        if attempt.is_before_restart():
            return self._end(attempt, "failed", "the machine or container of the host restarted", "restart")
        return self._end(attempt, "lost", reason)

    def _read_cancel_flags(self, living: list[AttemptDir]) -> None:
        """Update which attempts are cancelled. While Redis is unreachable, the previous flags stay."""
        cancelled = set(self._cancelled_since)
        if living:
            with contextlib.suppress(RedisError, OSError):
                flags = self._redis.mget([cancel_key(a.job, a.attempt) for a in living])
                cancelled = {attempt for attempt, flag in zip(living, flags, strict=True) if flag is not None}
        now = time.monotonic()
        self._cancelled_since = {a: self._cancelled_since.get(a, now) for a in living if a in cancelled}

    def _end_stuck(self, attempt: AttemptDir) -> bool:
        """End a cancelled attempt whose supervisor or guardian does not respond."""
        since = self._cancelled_since.get(attempt)
        if since is None or time.monotonic() - since < CANCEL_TIMEOUT_S or attempt.exit_file.exists():
            return False
        log.warning("%s/%s: cancelled, but the supervisor did not answer", attempt.job, attempt.attempt)
        kill_supervisor(attempt)
        return self._end(attempt, "cancelled", "cancelled on request; the supervisor did not answer")

    def _describe_stopped(self, living: Iterable[AttemptDir]) -> dict[AttemptDir, str]:
        """Return a sentence for each attempt with stopped processes."""
        by_cookie = {f"{a.job}/{a.attempt}": a for a in living}
        supervisors = {found.pid: a for a in by_cookie.values() if (found := a.get_supervisor()) is not None}
        stopped_since: dict[ProcessId, float] = {}
        parts: dict[AttemptDir, list[str]] = {}
        for process in psutil.process_iter(["status"]):
            state, identity = STOPPED_STATES.get(process.info["status"]), get_process_id(process.pid)
            if state is None or identity is None:
                continue
            attempt = supervisors.get(process.pid) or by_cookie.get(read_cookie(process, self._run_dir) or "")
            if attempt is None:
                continue
            stopped_since[identity] = self._stopped_since.get(identity, time.time())
            role = "the supervisor" if process.pid in supervisors else _describe_role(process)
            since = datetime.fromtimestamp(stopped_since[identity], UTC).strftime("%H:%M:%S")
            parts.setdefault(attempt, []).append(f"{role} is stopped (state {state}) since {since} UTC")
        self._stopped_since = stopped_since
        return {attempt: _join(sorted(sentences)) for attempt, sentences in parts.items()}

    def _end(self, attempt: AttemptDir, outcome: Outcome, reason: str, host_fault: HostFault | None = None) -> bool:
        """Kill the attempt's processes and record its end. Until none is left, its slots stay in use."""
        survivors = kill_processes(attempt.job, attempt.attempt, KILL_TIMEOUT_S, attempt.run_dir)
        if survivors:
            write_json(attempt.note_file, clean_text(f"cannot stop processes {survivors}; check this host"))
            return False
        if (folder := attempt.get_socket_folder()) is not None:
            discard_path(folder)
        if attempt.exit_file.exists():  # the supervisor has written it in the meantime
            return True
        if outcome != "cancelled" and attempt.get_supervisor() is not None:  # the supervisor started late
            return False
        return self._exits.record(attempt, outcome, reason, host_fault)


def read_report_or_note(attempt: AttemptDir) -> AttemptReport:
    """Return the attempt's report. If its files are broken, return a running attempt with the reason as its note."""
    try:
        return attempt.read_report()
    except Exception as error:
        if not isinstance(error, BadFileError):
            log.exception("cannot report %s/%s", attempt.job, attempt.attempt)
        note = clean_text(f"the host cannot read the files of the attempt: {error}")
        return AttemptReport(job=attempt.job, attempt=attempt.attempt, state="running", slots=[], note=note)


def kill_supervisor(attempt: AttemptDir) -> None:
    """Send KILL to the supervisor, also if it is stopped. Its guardian then ends the ranks."""
    supervisor = attempt.get_supervisor()
    if supervisor is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while get_process_id(supervisor.pid) == supervisor and time.monotonic() < deadline:
        time.sleep(0.01)


def _build_supervisor_arguments(attempt: AttemptDir) -> list[str]:
    return ["-m", "workers.host.supervisor", str(attempt.run_dir), attempt.job, str(attempt.attempt)]


def _is_supervisor_starting(attempt: AttemptDir) -> bool:
    """Return whether the supervisor can still write its PID file. On a busy machine, its imports take long."""
    if attempt.pid_file.exists():
        return False
    ordered = attempt.get_order_time()
    if ordered is not None and time.time() - ordered <= SUPERVISOR_START_TIMEOUT_S:
        return True
    arguments = _build_supervisor_arguments(attempt)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-len(arguments) :] == arguments:
                return True
    return False


def _write_note(attempt: AttemptDir, text: str) -> bool:
    """Store the note that the supervisor and the reporter read. Return whether it changed."""
    if attempt.read_note() == text:
        return False
    if text:
        write_json(attempt.note_file, text)
    else:
        remove_path(attempt.note_file)
    return True


def _describe_role(process: psutil.Process) -> str:
    """Return the role of a process in its attempt."""
    try:
        command, rank = process.cmdline(), process.environ().get("RANK")
        parent = process.parent()
        if rank is not None:
            is_rank = parent is not None and "workers.host.launch" in parent.cmdline()
            return f"rank {rank}" if is_rank else f"process {process.pid} of rank {rank}"
    except (psutil.Error, OSError):
        command = []
    if "workers.host.guardian" in command:
        return "the guardian"
    return "torchrun" if "workers.host.launch" in command else f"process {process.pid}"


def _join(sentences: list[str]) -> str:
    hidden = len(sentences) - MAX_STOPPED_NAMED
    return ", ".join(sentences[:MAX_STOPPED_NAMED]) + (f", and {hidden} more processes" if hidden > 0 else "")


class AttemptStarter:
    """Start supervisors. Thread-safe."""

    def __init__(self, settings: HostSettings, exits: HostExits, health: HealthCheck | None = None) -> None:
        self._settings, self._exits, self._health = settings, exits, health or HealthCheck(settings)
        self._lock = threading.Lock()

    def start(self, order: LaunchOrder) -> None:
        """Start the supervisor of an attempt once, and not after the attempt was reported as failed."""
        attempt = get_attempt_dir(self._settings.run_dir, order["job"], order["attempt"])
        # Without the lock, one delivery of the order could report a failure while the next starts the attempt.
        with self._lock:
            if self._exits.is_pending(attempt) or os.path.lexists(attempt.host_dir):
                return
            if problem := self._health.find_launch_problem() or self._health.find_order_problem(order):
                self._record_failure(attempt, f"Not started on {self._settings.name}: {problem}")
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
                log_launch_order(log, "started the supervisor", order)
            except (OSError, subprocess.SubprocessError) as error:
                self._fail(claimed, error)

    def _start_supervisor(self, attempt: AttemptDir) -> None:
        # --fork detaches the supervisor from this process and its group.
        command = ["setsid", "--fork", sys.executable]
        with attempt.supervisor_log.open("ab") as out:
            subprocess.run(
                [*command, *_build_supervisor_arguments(attempt)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=os.getcwd(),
                env=os.environ | get_isolation_variables(self._settings),
                check=True,
            )

    def _fail(self, attempt: AttemptDir, error: Exception) -> None:
        self._record_failure(attempt, format_start_failure(self._settings.name, error, self._settings.run_dir))

    def _record_failure(self, attempt: AttemptDir, reason: str) -> None:
        log.error("cannot start %s/%s: %s", attempt.job, attempt.attempt, reason)
        self._exits.record(attempt, "failed", reason, host_fault="launch")
