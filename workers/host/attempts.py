"""Files of the attempts on this host: paths, claims, and pruning.

Two trees below RUN_DIR. `.host/<job>/<attempt>/` belongs to the host: order, PID of the supervisor, exit report. The
job's processes do not see it. `<job>/<attempt>/` belongs to the job: spec, logs, and working directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from contracts.codec import BadMessageError, validate_exit_report, validate_launch_order
from contracts.control import VERSION, AttemptReport, ExitReport, HostFault, LaunchOrder, Outcome
from workers.disk import BadFileError, TreeWalk, discard_path, read_json, remove_path, write_json
from workers.host.processes import ProcessId, get_process_id, get_start_id
from workers.host.settings import HostSettings

JOB_NAME = re.compile(r"[a-z0-9-]{1,64}")
HOST_TREE = ".host"
SOCKET_FOLDER_PREFIX = "meshboard-"
MAX_SOCKET_ROOT_BYTES = 70  # the path of a unix socket has at most 107 bytes
MAX_TEXT_CHARS = 1000
NEWEST_FILE = "newest"  # in a job's host folder: the highest pruned attempt
log = logging.getLogger(__name__)
PRUNE_INTERVAL_S = 60.0
REMEMBER_PRUNED_S = 30 * 86400.0  # of a pruned attempt's number, which is longer than any order is valid
MAX_DRAFT_AGE_S = 3600.0  # of an interrupted claim


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
    def upload(self) -> Path:
        """Return the folder of the uploaded script, which the job can change."""
        return self.job_dir / "upload"

    @property
    def environment(self) -> Path:
        """Return the folder for the packages of an upload."""
        return self.job_dir / "environment"

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

    def is_before_restart(self) -> bool:
        """Return whether this machine or container restarted since the start of the supervisor."""
        try:
            return bool(read_json(self.pid_file)["start"] != get_start_id())
        except (BadFileError, TypeError, KeyError):  # also for a supervisor of an older version
            return False

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
    """Return the paths of an attempt. Raises ValueError."""
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


def build_host_exit_report(
    attempt: AttemptDir, outcome: Outcome, reason: str, host_fault: HostFault | None = None
) -> ExitReport:
    """Build the exit report of an attempt whose supervisor wrote none."""
    now = time.time()
    report = ExitReport(
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
    if host_fault is not None:
        report["host_fault"] = host_fault
    return report


def clean_text(text: str) -> str:
    """Return a text that fits into a report."""
    return text[:MAX_TEXT_CHARS].replace("\0", "\ufffd")


def claim_attempt(run_dir: Path, order: LaunchOrder) -> AttemptDir | None:
    """Create the directories of an order, or return None if there is nothing to start.

    Nothing starts if this or a later attempt was claimed before, or if a slot is in use. For a slot in use, the
    attempt gets an exit report. Raises OSError.
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
                report = build_host_exit_report(attempt, "failed", conflict, host_fault="launch")
                write_json(draft / attempt.exit_file.name, report)
            draft.rename(attempt.host_dir)
        except OSError:
            for folder in (draft, attempt.job_dir):
                discard_path(folder)
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
    remove_path(attempt.job_dir)  # left by an interrupted claim
    for folder in (attempt.run_dir, attempt.job_dir.parent, attempt.job_dir):
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    for folder in (attempt.logs, attempt.work, attempt.tmp):
        folder.mkdir(mode=0o700)
    write_json(attempt.spec, spec)
    attempt.spec.chmod(0o644)


class Pruner:
    """Prune in a separate thread, because removing gigabytes must not delay a heartbeat."""

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-pruner", daemon=True)
        self.problem = ""  # folder that cannot be removed and the reason, for the host's page

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.prune()
            self._stopped.wait(PRUNE_INTERVAL_S)

    def prune(self) -> None:
        """Prune once, and note what cannot be removed. A problem is logged when it changes."""
        settings = self._settings
        try:
            failures = prune_attempts(settings.run_dir, settings.keep_runs_s, settings.keep_runs_bytes).failures
        except Exception as error:
            log.exception("cannot prune the run directory")
            self.problem = f"Old attempts in {settings.run_dir} cannot be removed: {error}."
            return
        problem = _describe_failures(failures)
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem


class _Candidate(NamedTuple):
    acknowledged: float
    attempt: AttemptDir
    num_bytes: int


class PruneResult(NamedTuple):
    """Removed folders, and the folders that cannot be removed with the reasons."""

    removed: list[AttemptDir]
    failures: dict[Path, str]


def prune_attempts(run_dir: Path, keep_s: float, keep_bytes: int) -> PruneResult:
    """Remove acknowledged attempts older than `keep_s`, then the oldest until the rest takes at most `keep_bytes`.

    A living or unacknowledged attempt is never removed. A failed removal does not change which others are removed.
    """
    candidates = []
    for attempt in iterate_attempts(run_dir):
        with contextlib.suppress(FileNotFoundError):
            acknowledged = attempt.acknowledged_marker.stat().st_mtime
            num_bytes = _measure_bytes(attempt.host_dir) + _measure_bytes(attempt.job_dir)
            candidates.append(_Candidate(acknowledged, attempt, num_bytes))
    result = PruneResult([], {})
    left_bytes = sum(candidate.num_bytes for candidate in candidates)
    for acknowledged, attempt, num_bytes in sorted(candidates):
        if time.time() - acknowledged <= keep_s and left_bytes <= keep_bytes:
            break
        left_bytes -= num_bytes
        try:
            _remove(attempt)
            result.removed.append(attempt)
        except OSError as error:
            result.failures[attempt.job_dir] = str(error)
    result.failures.update(_remove_leftovers(run_dir))
    return result


def _describe_failures(failures: dict[Path, str]) -> str:
    if not failures:
        return ""
    path, reason = next(iter(failures.items()))
    others = f" {len(failures) - 1} more folders cannot be removed." if len(failures) > 1 else ""
    return clean_text(f"The old folder {path} cannot be removed: {reason}.{others}")


def _remove(attempt: AttemptDir) -> None:
    """Remove both trees of an attempt. The host's tree is last, so an interrupted removal is repeated."""
    remove_path(attempt.job_dir)
    with lock_claims(attempt.run_dir):
        job_host_dir = attempt.host_dir.parent
        write_json(job_host_dir / NEWEST_FILE, max(read_newest_pruned(job_host_dir), attempt.attempt))
        remove_path(attempt.host_dir)
        with contextlib.suppress(OSError):  # the job has another attempt
            attempt.job_dir.parent.rmdir()


def _remove_leftovers(run_dir: Path) -> dict[Path, str]:
    """Remove interrupted claims, and the attempt numbers of old jobs. Return the failures."""
    failures = {}
    with lock_claims(run_dir):
        for job_host_dir in (run_dir / HOST_TREE).glob("*/"):
            try:
                _remove_job_leftovers(job_host_dir)
            except OSError as error:
                failures[job_host_dir] = str(error)
    return failures


def _remove_job_leftovers(job_host_dir: Path) -> None:
    now = time.time()
    for draft in job_host_dir.glob(".claim-*"):
        if now - draft.stat().st_mtime > MAX_DRAFT_AGE_S:
            remove_path(draft)
    newest = job_host_dir / NEWEST_FILE
    is_old = newest.exists() and now - newest.stat().st_mtime > REMEMBER_PRUNED_S
    if is_old and len(list(job_host_dir.iterdir())) == 1:
        remove_path(job_host_dir)


def _measure_bytes(folder: Path) -> int:
    """Return the bytes that the readable content of a folder takes on disk."""
    total = 0
    with contextlib.suppress(OSError):  # A process of the job can change the folder.
        for _, _, status in TreeWalk(folder):
            total += status.st_blocks * 512
    return total
