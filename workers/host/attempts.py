"""An attempt on disk: the host's own memory of what it runs.

Two trees below RUN_DIR. `.host/<job>/<attempt>/` is the host's: the order, the supervisor's pid, the exit report; no
process of the job is told of it. `<job>/<attempt>/` is the job's: its spec, its logs and the directory it works in.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from contracts.codec import BadMessageError, validate_exit_report, validate_launch_order
from contracts.control import VERSION, AttemptReport, ExitReport, LaunchOrder, Outcome
from workers.host.files import BadFileError, read_json
from workers.host.processes import ProcessId, process_id

JOB_NAME = re.compile(r"[a-z0-9-]{1,64}")
OWN_TREE = ".host"
SOCKET_FOLDER = "meshboard-"  # what the name of a supervisor's folder starts with
LONGEST_ROOT = 70  # bytes, beside what we put below it: a unix socket's path has at most 107


class AttemptDir(NamedTuple):
    """Paths of one attempt."""

    run_dir: Path
    job: str
    attempt: int

    @property
    def own(self) -> Path:
        """The host's."""
        return self.run_dir / OWN_TREE / self.job / str(self.attempt)

    @property
    def given(self) -> Path:
        """The job's."""
        return self.run_dir / self.job / str(self.attempt)

    @property
    def spec(self) -> Path:
        return self.given / "spec.json"

    @property
    def logs(self) -> Path:
        return self.given / "logs"

    @property
    def work(self) -> Path:
        """Where its processes start."""
        return self.given / "work"

    @property
    def temporary(self) -> Path:
        """Its /tmp, in bubblewrap."""
        return self.given / "tmp"

    @property
    def failure(self) -> Path:
        """What torchrun's launcher says of the rank that failed first: the job's word, not the host's."""
        return self.logs / "failure.json"

    @property
    def order(self) -> Path:
        return self.own / "order.json"

    @property
    def supervisor(self) -> Path:
        return self.own / "supervisor.pid"

    @property
    def supervisor_log(self) -> Path:
        return self.own / "supervisor.log"

    @property
    def running(self) -> Path:
        return self.own / "running"

    @property
    def exit(self) -> Path:
        return self.own / "exit.json"

    @property
    def note(self) -> Path:
        return self.own / "note.json"

    @property
    def acknowledged(self) -> Path:
        return self.own / "acknowledged"

    def supervisor_id(self) -> ProcessId | None:
        """The supervisor while it lives; a pid file that is broken names nobody."""
        try:
            recorded = read_json(self.supervisor)
            named = ProcessId(recorded["pid"], recorded["started"])
            return named if process_id(named.pid) == named else None
        except (BadFileError, TypeError, KeyError):
            return None

    def socket_folder(self) -> Path | None:
        """Where its supervisor has, or had, its socket."""
        try:
            folder = Path(read_json(self.supervisor)["folder"])
        except (BadFileError, TypeError, KeyError):
            return None
        return folder if folder.name.startswith(SOCKET_FOLDER) else None

    def ordered(self) -> float | None:
        """When the order came, unix seconds; None where its file is gone."""
        try:
            return self.order.stat().st_mtime
        except OSError:
            return None

    def read_order(self) -> LaunchOrder:
        """Raises BadFileError."""
        try:
            return validate_launch_order(read_json(self.order))
        except BadMessageError as error:
            raise BadFileError(f"order.json: {error}") from None

    def read_exit(self) -> ExitReport | None:
        """None while there is none. Raises BadFileError."""
        told = read_json(self.exit)
        if told is None:
            return None
        try:
            report = validate_exit_report(told)
        except BadMessageError as error:
            raise BadFileError(f"exit.json: {error}") from None
        if (report["job"], report["attempt"]) != (self.job, self.attempt):
            raise BadFileError(f"exit.json belongs to {report['job']}/{report['attempt']}")
        return report

    def read_note(self) -> str:
        """What a person should know of it, empty when nothing."""
        try:
            note = read_json(self.note)
        except BadFileError:
            return ""
        return note[:1000].replace("\0", "\ufffd") if isinstance(note, str) else ""

    def report(self) -> AttemptReport:
        """What is known of it. Raises BadFileError."""
        exited = self.read_exit()
        if exited is not None:
            slots = []
            with contextlib.suppress(BadFileError):
                slots = self.read_order()["slots"]
            return AttemptReport(job=self.job, attempt=self.attempt, state="exited", slots=slots, exit=exited)
        slots = self.read_order()["slots"]
        state: Literal["running", "starting"] = "running" if self.running.exists() else "starting"
        report = AttemptReport(job=self.job, attempt=self.attempt, state=state, slots=slots)
        if note := self.read_note():
            report["note"] = note
        return report


def socket_root() -> Path:
    """Where folders with a socket are made: TMPDIR, or /tmp where that is too long. Raises OSError: there is none."""
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= LONGEST_ROOT else Path("/tmp")  # noqa: S108


def attempt_dir(run_dir: Path, job: str, attempt: int) -> AttemptDir:
    """The directories of an attempt.

    Raises:
        ValueError: when the job's name could leave `run_dir`.
    """
    if not JOB_NAME.fullmatch(job) or attempt < 1:
        raise ValueError(f"not an attempt: {job!r} {attempt!r}")
    return AttemptDir(run_dir, job, attempt)


def kept(run_dir: Path) -> Iterator[AttemptDir]:
    """Every attempt this host has on disk."""
    for path in sorted((run_dir / OWN_TREE).glob("*/*")):
        if JOB_NAME.fullmatch(path.parent.name) and path.name.isascii() and path.name.isdigit():
            yield AttemptDir(run_dir, path.parent.name, int(path.name))


def attempts(run_dir: Path) -> Iterator[AttemptDir]:
    """Those whose end the controller has not acknowledged."""
    return (found for found in kept(run_dir) if not found.acknowledged.exists())


def report_of_host(attempt: AttemptDir, outcome: Outcome, reason: str) -> ExitReport:
    """An exit report in the host worker's own words, where no supervisor wrote one."""
    now = time.time()
    return ExitReport(
        v=VERSION,
        job=attempt.job,
        attempt=attempt.attempt,
        outcome=outcome,
        reason=reason[:1000].replace("\0", "\ufffd"),
        exit_code=None,
        rank=None,
        signal=None,
        log_tail=[],
        started=attempt.ordered() or now,
        finished=now,
        summary=None,
    )
