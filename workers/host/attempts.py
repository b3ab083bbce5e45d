"""Files of the attempts on this host.

Two trees below RUN_DIR. `.host/<job>/<attempt>/` belongs to the host: order, PID of the supervisor, exit report. The
job's processes do not see it. `<job>/<attempt>/` belongs to the job: spec, logs, and working directory.
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
from workers.host.processes import ProcessId, get_process_id

JOB_NAME = re.compile(r"[a-z0-9-]{1,64}")
HOST_TREE = ".host"
SOCKET_FOLDER_PREFIX = "meshboard-"
MAX_SOCKET_ROOT_BYTES = 70  # the path of a unix socket has at most 107 bytes
MAX_TEXT_CHARS = 1000


class AttemptDir(NamedTuple):
    """Paths of one attempt."""

    run_dir: Path
    job: str
    attempt: int

    @property
    def host_dir(self) -> Path:
        return self.run_dir / HOST_TREE / self.job / str(self.attempt)

    @property
    def job_dir(self) -> Path:
        return self.run_dir / self.job / str(self.attempt)

    @property
    def spec(self) -> Path:
        return self.job_dir / "spec.json"

    @property
    def logs(self) -> Path:
        return self.job_dir / "logs"

    @property
    def work(self) -> Path:
        """Return the working directory of the job's processes."""
        return self.job_dir / "work"

    @property
    def tmp(self) -> Path:
        """Return the folder that a job in bubblewrap sees as /tmp."""
        return self.job_dir / "tmp"

    @property
    def failure_file(self) -> Path:
        """Return the launcher's report of the first failed rank, which the job's user can write."""
        return self.logs / "failure.json"

    @property
    def order_file(self) -> Path:
        return self.host_dir / "order.json"

    @property
    def pid_file(self) -> Path:
        return self.host_dir / "supervisor.pid"

    @property
    def supervisor_log(self) -> Path:
        return self.host_dir / "supervisor.log"

    @property
    def running_marker(self) -> Path:
        return self.host_dir / "running"

    @property
    def exit_file(self) -> Path:
        return self.host_dir / "exit.json"

    @property
    def note_file(self) -> Path:
        return self.host_dir / "note.json"

    @property
    def acknowledged_marker(self) -> Path:
        return self.host_dir / "acknowledged"

    def get_supervisor(self) -> ProcessId | None:
        """Return the identity of the supervisor, or None if it has ended or its PID file is invalid."""
        try:
            recorded = read_json(self.pid_file)
            supervisor = ProcessId(recorded["pid"], recorded["started"])
            return supervisor if get_process_id(supervisor.pid) == supervisor else None
        except (BadFileError, TypeError, KeyError):
            return None

    def get_socket_folder(self) -> Path | None:
        """Return the folder of the supervisor's socket."""
        try:
            folder = Path(read_json(self.pid_file)["folder"])
        except (BadFileError, TypeError, KeyError):
            return None
        return folder if folder.name.startswith(SOCKET_FOLDER_PREFIX) else None

    def get_order_time(self) -> float | None:
        """Return when the order arrived, in unix seconds, or None if its file is missing."""
        try:
            return self.order_file.stat().st_mtime
        except OSError:
            return None

    def read_order(self) -> LaunchOrder:
        """Read the order. Raises BadFileError."""
        try:
            return validate_launch_order(read_json(self.order_file))
        except BadMessageError as error:
            raise BadFileError(f"order.json: {error}") from None

    def read_exit(self) -> ExitReport | None:
        """Read the exit report, or return None if it is missing. Raises BadFileError."""
        content = read_json(self.exit_file)
        if content is None:
            return None
        try:
            report = validate_exit_report(content)
        except BadMessageError as error:
            raise BadFileError(f"exit.json: {error}") from None
        if (report["job"], report["attempt"]) != (self.job, self.attempt):
            raise BadFileError(f"exit.json belongs to {report['job']}/{report['attempt']}")
        return report

    def read_note(self) -> str:
        """Read the note for the job's page, which is empty if there is nothing to show."""
        try:
            note = read_json(self.note_file)
        except BadFileError:
            return ""
        return clean_text(note) if isinstance(note, str) else ""

    def read_report(self) -> AttemptReport:
        """Build the report of the attempt from its files. Raises BadFileError."""
        exit_report = self.read_exit()
        if exit_report is not None:
            slots = []
            with contextlib.suppress(BadFileError):
                slots = self.read_order()["slots"]
            return AttemptReport(job=self.job, attempt=self.attempt, state="exited", slots=slots, exit=exit_report)
        slots = self.read_order()["slots"]
        state: Literal["running", "starting"] = "running" if self.running_marker.exists() else "starting"
        report = AttemptReport(job=self.job, attempt=self.attempt, state=state, slots=slots)
        if note := self.read_note():
            report["note"] = note
        return report


def get_attempt_dir(run_dir: Path, job: str, attempt: int) -> AttemptDir:
    """Return the paths of an attempt.

    Raises:
        ValueError: the job name could leave `run_dir`.
    """
    if not JOB_NAME.fullmatch(job) or attempt < 1:
        raise ValueError(f"not an attempt: {job!r} {attempt!r}")
    return AttemptDir(run_dir, job, attempt)


def iterate_attempts(run_dir: Path) -> Iterator[AttemptDir]:
    """Yield every attempt on disk."""
    for path in sorted((run_dir / HOST_TREE).glob("*/*")):
        if JOB_NAME.fullmatch(path.parent.name) and path.name.isascii() and path.name.isdigit():
            yield AttemptDir(run_dir, path.parent.name, int(path.name))


def iterate_unacknowledged(run_dir: Path) -> Iterator[AttemptDir]:
    """Yield the attempts whose end the controller has not acknowledged."""
    return (attempt for attempt in iterate_attempts(run_dir) if not attempt.acknowledged_marker.exists())


def get_socket_root() -> Path:
    """Return the parent of socket folders: TMPDIR, or /tmp if that path is too long. Raises OSError."""
    root = Path(tempfile.gettempdir())
    return root if len(os.fsencode(root)) <= MAX_SOCKET_ROOT_BYTES else Path("/tmp")  # noqa: S108


def build_host_exit_report(attempt: AttemptDir, outcome: Outcome, reason: str) -> ExitReport:
    """Build the exit report of an attempt whose supervisor wrote none."""
    now = time.time()
    return ExitReport(
        v=VERSION,
        job=attempt.job,
        attempt=attempt.attempt,
        outcome=outcome,
        reason=clean_text(reason),
        exit_code=None,
        rank=None,
        signal=None,
        log_tail=[],
        started=attempt.get_order_time() or now,
        finished=now,
        summary=None,
    )


def clean_text(text: str) -> str:
    """Return a text that fits into a report."""
    return text[:MAX_TEXT_CHARS].replace("\0", "\ufffd")
