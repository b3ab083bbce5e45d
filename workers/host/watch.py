"""Looks after the attempts of this host: buries the dead, ends what nobody else can end, notes what stands still."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import psutil
import redis
from redis.exceptions import RedisError

from contracts.control import AttemptReport, Outcome
from contracts.names import cancel_key
from workers.host.attempts import AttemptDir, attempts
from workers.host.ends import Ends
from workers.host.files import BadFileError, discard, write_json
from workers.host.processes import ProcessId, cookie_of, process_id, sweep

log = logging.getLogger(__name__)

START_GRACE_S = 15.0  # from the order to the supervisor's pid file
# A supervisor needs 1 s to see the flag, 10 s of TERM and a moment for KILL. With our own look each second and the
# sweep, an attempt whose supervisor does not answer is gone 15 s after the flag was raised.
ANSWER_S = 12.5
SWEEP_S = 1.5
STILL = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}
MOST_NOTED = 4


class Watch:
    """What this worker remembers of the attempts from one look to the next."""

    def __init__(self, run_dir: Path, client: redis.Redis, ends: Ends | None = None) -> None:
        self._run_dir, self._redis, self._ends = run_dir, client, ends or Ends()
        self._asked: dict[AttemptDir, float] = {}  # since when its cancellation stands, monotonic
        self._still: dict[ProcessId, float] = {}  # since when a process is seen stopped, unix seconds

    def look(self) -> bool:
        """One pass, an attempt's trouble apart from the others'. True when there is something to report at once."""
        living, changed = [], False
        for attempt in attempts(self._run_dir):
            try:
                ended = self._bury(attempt)
                changed = ended or changed
                if not (ended or attempt.exit.exists() or self._ends.keeps(attempt)):
                    living.append(attempt)
            except Exception:
                log.exception("cannot check %s/%s", attempt.job, attempt.attempt)
        self._see_flags(living)
        notes = self._notes(living)
        for attempt in living:
            try:
                changed = self._end_unanswered(attempt) or self._note(attempt, notes.get(attempt, "")) or changed
            except Exception:
                log.exception("cannot check %s/%s", attempt.job, attempt.attempt)
        return changed

    def _bury(self, attempt: AttemptDir) -> bool:
        """Write the exit report of an attempt whose supervisor is gone without a sound one. True if it was missing."""
        # In this order: a supervisor found dead has already written its report, if it ever will.
        alive = attempt.supervisor_id() is not None or not _had_time(attempt)
        reason = "the supervisor ended without an exit report; its ranks were stopped"
        try:
            if attempt.read_exit() is not None:
                return False
        except BadFileError as error:
            log.warning("%s/%s: %s", attempt.job, attempt.attempt, error)
            discard(attempt.exit)
            reason = f"the supervisor ended, and its report cannot be read: {error}"
        return not alive and self._conclude(attempt, "lost", reason)

    def _see_flags(self, living: list[AttemptDir]) -> None:
        """Which attempts are to be cancelled; what Redis cannot tell now stays as it was."""
        raised = set(self._asked)
        if living:
            with contextlib.suppress(RedisError, OSError):
                told = self._redis.mget([cancel_key(a.job, a.attempt) for a in living])
                raised = {attempt for attempt, flag in zip(living, told, strict=True) if flag is not None}
        now = time.monotonic()
        self._asked = {attempt: self._asked.get(attempt, now) for attempt in living if attempt in raised}

    def _end_unanswered(self, attempt: AttemptDir) -> bool:
        """End an attempt that should long be cancelled: its supervisor or guardian is stopped, or worse."""
        asked = self._asked.get(attempt)
        if asked is None or time.monotonic() - asked < ANSWER_S or attempt.exit.exists():
            return False
        log.warning("%s/%s: cancelled, but the supervisor did not answer", attempt.job, attempt.attempt)
        kill_supervisor(attempt)
        return self._conclude(attempt, "cancelled", "cancelled on request; the supervisor did not answer")

    def _notes(self, living: Iterable[AttemptDir]) -> dict[AttemptDir, str]:
        """A sentence for each attempt of which something is stopped."""
        by_cookie = {f"{a.job}/{a.attempt}": a for a in living}
        supervisors = {found.pid: a for a in by_cookie.values() if (found := a.supervisor_id()) is not None}
        seen: dict[ProcessId, float] = {}
        parts: dict[AttemptDir, list[str]] = {}
        for process in psutil.process_iter(["status"]):
            state, identity = STILL.get(process.info["status"]), process_id(process.pid)
            if state is None or identity is None:
                continue
            attempt = supervisors.get(process.pid) or by_cookie.get(cookie_of(process, self._run_dir) or "")
            if attempt is None:
                continue
            seen[identity] = self._still.get(identity, time.time())
            who = "the supervisor" if process.pid in supervisors else _role(process)
            since = datetime.fromtimestamp(seen[identity], UTC).strftime("%H:%M:%S")
            parts.setdefault(attempt, []).append(f"{who} is stopped (state {state}) since {since} UTC")
        self._still = seen
        return {attempt: _sentence(said) for attempt, said in parts.items()}

    def _note(self, attempt: AttemptDir, text: str) -> bool:
        """Keep the note where supervisor and reporter both read it. True when it changed."""
        if attempt.read_note() == text:
            return False
        if text:
            write_json(attempt.note, text)
        else:
            discard(attempt.note)
        return True

    def _conclude(self, attempt: AttemptDir, outcome: Outcome, reason: str) -> bool:
        """Sweep, and say how it ended once nothing is left; until then its slots are not free. True when it is news."""
        survivors = sweep(attempt.job, attempt.attempt, SWEEP_S, attempt.run_dir)
        if survivors:
            write_json(attempt.note, f"cannot stop processes {survivors}; check this host"[:1000])
            return False
        if (folder := attempt.socket_folder()) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if attempt.exit.exists():  # written while we were at it
            return True
        if outcome == "lost" and attempt.supervisor_id() is not None:  # it was late, and has begun while we were at it
            return False
        return self._ends.conclude(attempt, outcome, reason)


def told_of(attempt: AttemptDir) -> AttemptReport:
    """Its report; of one whose files are broken, that it is there and why no more is known."""
    try:
        return attempt.report()
    except Exception as error:
        if not isinstance(error, BadFileError):
            log.exception("cannot report %s/%s", attempt.job, attempt.attempt)
        note = f"the host cannot read the files of the attempt: {error}"[:1000].replace("\0", "\ufffd")
        return AttemptReport(job=attempt.job, attempt=attempt.attempt, state="running", slots=[], note=note)


def kill_supervisor(attempt: AttemptDir) -> None:
    """KILL works on a stopped process too; its guardian then ends the ranks, if it can."""
    supervisor = attempt.supervisor_id()
    if supervisor is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor.pid, signal.SIGKILL)
    deadline = time.monotonic() + SWEEP_S
    while process_id(supervisor.pid) == supervisor and time.monotonic() < deadline:
        time.sleep(0.01)


def _had_time(attempt: AttemptDir) -> bool:
    """False while a supervisor may still be on its way to writing its pid."""
    ordered = attempt.ordered()
    return attempt.supervisor.exists() or ordered is None or time.time() - ordered > START_GRACE_S


def _role(process: psutil.Process) -> str:
    """What a process of an attempt is to it, in words."""
    try:
        words, rank = process.cmdline(), process.environ().get("RANK")
        parent = process.parent()
        if rank is not None:
            direct = parent is not None and "workers.host.start.launch" in parent.cmdline()
            return f"rank {rank}" if direct else f"process {process.pid} of rank {rank}"
    except (psutil.Error, OSError):
        words = []
    if "workers.host.guardian" in words:
        return "the guardian"
    return "torchrun" if "workers.host.start.launch" in words else f"process {process.pid}"


def _sentence(said: list[str]) -> str:
    more = f", and {len(said) - MOST_NOTED} more processes" if len(said) > MOST_NOTED else ""
    return ", ".join(sorted(said)[:MOST_NOTED]) + more
