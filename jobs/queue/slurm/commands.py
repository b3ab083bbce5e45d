"""Run Slurm commands here or on a login node, and poll Slurm in rounds. This module does not use the database."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from contracts.doctor import Finding
from jobs.queue.slurm.script import Site, Submission, get_log_folder
from jobs.queue.slurm.states import (
    HELD,
    HELD_BY_USER,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    SlurmJob,
    format_job_name,
    has_ended,
    parse_sacct,
    parse_squeue,
)

COMMAND_TIMEOUT_S = 20.0
SUBMIT_TIMEOUT_S = 30.0
SACCT_START = "now-7days"  # for attempts whose Slurm ID was not stored
MAX_JOBS_PER_COMMAND = 100
MAX_SUBMISSIONS_PER_POLL = 20  # each is one command, and delays the rest of the round
TAIL_BYTES = 2000
MAX_COMPLAINT_CHARACTERS = 500
INHERITED_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF")  # no secrets
UTC_PREFIX = ("env", "TZ=UTC")  # Slurm prints times without a zone
SSH_FAILED = 255  # exit code of ssh itself
SSH_IDLE_S = 120  # until an unused connection is closed
# Slurm may have accepted the job despite these messages, so its name is looked up before it is submitted again.
UNREACHABLE = re.compile(
    r"unable to contact|timed out|connect failure|connection refused|zero bytes|standby|"
    r"communications? (connection|failure)|authentication",
    re.IGNORECASE,
)
# Messages about limits do not say whether the limit is temporary.
DEFERRED = re.compile(r"temporarily|try again|submit limit|submitlimit|too many", re.IGNORECASE)
DOCTOR_SUBJECT = "Slurm"


class SlurmUnavailableError(Exception):
    """Slurm does not answer now. The message says why."""


class SubmissionRejectedError(Exception):
    """Slurm will never accept the job. The message is Slurm's own."""


class SubmissionDeferredError(Exception):
    """Slurm does not accept the job now. The message is Slurm's own."""


class CommandResult(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Return the error message on one line."""
        text = " ".join((self.err.strip() or self.out.strip()).replace("\0", "").split())
        return text[-MAX_COMPLAINT_CHARACTERS:] or f"exit code {self.code}"


class CommandRunner(NamedTuple):
    """Run commands on `login` (user@host, "": this machine) with an optional configuration file of ssh."""

    login: str = ""
    ssh_config: str = ""

    def run(self, argv: Sequence[str], *, deadline_s: float, stdin: str = "") -> CommandResult:
        """Run a command.

        Raises:
            SlurmUnavailableError: The command or the login node is missing, or the deadline has passed.
        """
        where = f" on {self.login}" if self.login else ""
        command = [*UTC_PREFIX, *argv]
        try:
            done = subprocess.run(
                [*self._build_ssh_command(), shlex.join(command)] if self.login else command,
                input=stdin.encode(),
                env={name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ},
                capture_output=True,
                timeout=deadline_s,
                check=False,
                start_new_session=True,  # so that Ctrl-C stops only the controller
            )
        except subprocess.TimeoutExpired:
            problem = f"the command {argv[0]}{where} did not answer within {deadline_s:.0f} s"
            raise SlurmUnavailableError(problem) from None
        except OSError as error:
            problem = f"the command {argv[0]}{where} cannot start: {error.strerror or error}"
            raise SlurmUnavailableError(problem) from None
        out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        result = CommandResult(done.returncode, out, err)
        if self.login and result.code == SSH_FAILED:
            raise SlurmUnavailableError(f"Cannot reach the login node {self.login}: {result.complaint}")
        if result.code in (126, 127):  # env or the shell cannot start the command
            raise SlurmUnavailableError(f"the command {argv[0]}{where} cannot start: {result.complaint}")
        return result

    def _build_ssh_command(self) -> list[str]:
        """Return ssh with a shared connection, because a new one takes the login node seconds."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": f"{_create_socket_folder()}/%C",
            "ControlPersist": str(SSH_IDLE_S),
        }
        config = ["-F", self.ssh_config] if self.ssh_config else []
        return ["ssh", "-T", *config, *(f"-o{name}={value}" for name, value in options.items()), "--", self.login]


def _create_socket_folder() -> Path:
    """Create a private folder with a path that is short enough for sockets. Others could impersonate us there.

    Raises:
        SlurmUnavailableError: Other users have access.
    """
    folder = Path(tempfile.gettempdir()) / f"meshboard-ssh-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise SlurmUnavailableError(f"Other users can access the folder {folder}. Run chmod 700 on this folder.")
    return folder


class Slurm(NamedTuple):
    """Run Slurm's commands. All methods raise SlurmUnavailableError if Slurm does not answer."""

    runner: CommandRunner

    def list_jobs(self) -> list[SlurmJob]:
        """List Meshboard's jobs that slurmctld knows, with jobs that ended in the last minutes."""
        argv = ["squeue", "--me", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}"]
        return parse_squeue(self._run(argv).out)

    def list_accounted_jobs(self, names: Sequence[str]) -> list[SlurmJob] | None:
        """List jobs with these names in Slurm accounting, or return None if accounting is off."""
        found = []
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--starttime={SACCT_START}"]
        argv.append(f"--format={SACCT_FORMAT}")
        for some in _batch(names):
            result = self.runner.run([*argv, f"--name={','.join(some)}"], deadline_s=COMMAND_TIMEOUT_S)
            if result.code and "storage is disabled" in result.complaint:
                return None
            if result.code:
                raise SlurmUnavailableError(f"sacct: {result.complaint}")
            found += parse_sacct(result.out)
        return found

    def submit(self, options: Sequence[str], script: str) -> str:
        """Submit a script, and return the ID of its job.

        Raises:
            SlurmUnavailableError: The job may have been accepted.
            SubmissionDeferredError: The job was not accepted, and may be later.
            SubmissionRejectedError: The job will never be accepted.
        """
        argv = ["sbatch", "--parsable", *options]
        result = self.runner.run(argv, stdin=script, deadline_s=SUBMIT_TIMEOUT_S)
        job = result.out.strip().partition(";")[0]  # "17;cluster"
        if result.code == 0 and job.isascii() and job.isdigit():
            return job
        complaint = result.complaint
        if result.code == 0 or "sbatch: error: " not in complaint or UNREACHABLE.search(complaint):
            raise SlurmUnavailableError(f"sbatch: {complaint}")
        if DEFERRED.search(complaint):
            raise SubmissionDeferredError(complaint)  # complete, because the limit has its own line
        reason = complaint.rpartition("submission failed: ")[2].removeprefix("sbatch: error: ")
        raise SubmissionRejectedError(reason)

    def cancel(self, jobs: Collection[str]) -> None:
        """Cancel jobs. Ended jobs are ignored."""
        for ids in _batch(sorted(jobs)):
            self._change(["scancel", "--quiet", *ids])

    def hold(self, jobs: Collection[str]) -> None:
        """Hold pending jobs. Started jobs continue."""
        for ids in _batch(sorted(jobs)):
            self._change(["scontrol", "uhold", ",".join(ids)])

    def release(self, jobs: Collection[str]) -> None:
        """Release held jobs."""
        for ids in _batch(sorted(jobs)):
            self._change(["scontrol", "release", ",".join(ids)])

    def make_folder(self, folder: str) -> None:
        """Create a folder. Slurm does not start jobs whose log folder is missing."""
        self._run(["mkdir", "-p", "--", folder])

    def read_tail(self, path: str) -> str:
        """Return the end of a file, or an empty text if it is unreadable."""
        result = self.runner.run(["tail", "-c", str(TAIL_BYTES), "--", path], deadline_s=COMMAND_TIMEOUT_S)
        return result.out.replace("\0", "") if result.code == 0 else ""  # PostgreSQL stores no NUL

    def _change(self, argv: list[str]) -> None:
        result = self.runner.run(argv, deadline_s=COMMAND_TIMEOUT_S)
        if result.code and UNREACHABLE.search(result.complaint):
            raise SlurmUnavailableError(f"{argv[0]}: {result.complaint}")

    def _run(self, argv: list[str]) -> CommandResult:
        result = self.runner.run(argv, deadline_s=COMMAND_TIMEOUT_S)
        if result.code:
            raise SlurmUnavailableError(f"{argv[0]}: {result.complaint}")
        return result


def _batch(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[begin : begin + MAX_JOBS_PER_COMMAND] for begin in range(0, len(ids), MAX_JOBS_PER_COMMAND))


class PollRequest(NamedTuple):
    """The work of a polling round. Attempts are named as in Slurm."""

    followed: Mapping[str, str]  # stored Slurm ID, or ""
    submissions: tuple[Submission, ...] = ()
    cancel: frozenset[str] = frozenset()
    hold: frozenset[str] = frozenset()
    release: frozenset[str] = frozenset()
    logs: Mapping[str, str] = {}  # output of attempts that may fail before their supervisor joins
    folder: str = ""


@dataclass
class PollResult:
    """The result of a round. With `trouble`, missing information is unknown."""

    jobs: dict[str, SlurmJob] = field(default_factory=dict)  # by name
    absent: frozenset[str] = frozenset()  # names without a job, before the submissions
    accounts: bool = True  # Slurm accounting is on
    logs: dict[str, str] = field(default_factory=dict)
    submitted: dict[str, str] = field(default_factory=dict)  # Slurm ID by name
    rejected: dict[str, str] = field(default_factory=dict)  # reason by name
    deferred: dict[str, str] = field(default_factory=dict)  # reason by name
    trouble: str = ""


class PollingThread:
    """Run one round at a time in a thread, because Slurm may hang. An abandoned thread ends by its timeouts."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: PollResult | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], PollResult]) -> None:
        """Start a round while no other one runs."""
        assert not self.busy

        def run() -> None:
            try:
                self._result = work()
            except Exception as error:  # raised by `collect`
                self._error = error

        self._thread = threading.Thread(target=run, name="slurm", daemon=True)
        self._thread.start()

    def collect(self, timeout_s: float = 0.0) -> PollResult | None:
        """Return the result of a completed round once, or raise its error."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.busy:
            return None
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result


def poll(slurm: Slurm, request: PollRequest) -> PollResult:
    """Run a round, or the part of it that Slurm answers."""
    result = PollResult()
    try:
        _update_jobs(slurm, request, result)
        _submit(slurm, request, result)
    except SlurmUnavailableError as error:
        result.trouble = str(error)
    return result


def _update_jobs(slurm: Slurm, request: PollRequest, result: PollResult) -> None:
    """Find the job of each attempt, and cancel, hold, or release jobs. Duplicates with one name are cancelled."""
    found: dict[str, list[SlurmJob]] = {}
    for job in slurm.list_jobs():
        if job.name in request.followed:
            found.setdefault(job.name, []).append(job)
    unseen = [name for name in request.followed if name not in found]
    for job in _list_from_accounts(slurm, request, unseen, result):
        found.setdefault(job.name, []).append(job)
    duplicates: list[SlurmJob] = []
    for name, jobs in found.items():
        stored = request.followed[name]
        if stored:
            chosen = next((job for job in jobs if job.id == stored), None)
        else:
            chosen = min(jobs, key=lambda job: int(job.id))  # Slurm runs the first job of a name first
        duplicates += [job for job in jobs if job is not chosen]
        if chosen is not None:
            result.jobs[name] = chosen
    result.absent = frozenset(request.followed).difference(result.jobs, unseen if result.trouble else ())
    unwanted = {job.id for name, job in result.jobs.items() if name in request.cancel}
    unwanted |= {job.id for job in duplicates}
    if live := unwanted & {job.id for job in (*duplicates, *result.jobs.values()) if not has_ended(job)}:
        slurm.cancel(live)
    pending = [job for job in result.jobs.values() if job.state == "PENDING"]
    if hold := {job.id for job in pending if job.name in request.hold and not job.reason.startswith(HELD)}:
        slurm.hold(hold)
    if release := {job.id for job in pending if job.name in request.release and job.reason == HELD_BY_USER}:
        slurm.release(release)
    for name, job in result.jobs.items():
        if name in request.logs and job.state == "FAILED":
            result.logs[name] = slurm.read_tail(request.logs[name])


def _list_from_accounts(slurm: Slurm, request: PollRequest, unseen: list[str], result: PollResult) -> list[SlurmJob]:
    """List jobs that slurmctld no longer knows.

    A job with a stored ID that runs only according to accounting is gone. A job without a stored ID may have been
    submitted just now by another controller.
    """
    try:
        found = slurm.list_accounted_jobs(unseen) if unseen else []
    except SlurmUnavailableError as error:  # the answer of slurmctld still counts
        result.trouble = str(error)
        return []
    result.accounts = found is not None
    return [job for job in found or [] if has_ended(job) or not request.followed[job.name]]


def _submit(slurm: Slurm, request: PollRequest, result: PollResult) -> None:
    """Submit attempts without a job in Slurm. This check prevents a second submission after an interruption."""
    new = [each for each in request.submissions if each.name in result.absent][:MAX_SUBMISSIONS_PER_POLL]
    if new:
        slurm.make_folder(get_log_folder(request.folder))
    for submission in new:
        try:
            result.submitted[submission.name] = slurm.submit(submission.options, submission.script)
        except SubmissionRejectedError as error:
            result.rejected[submission.name] = str(error)
        except SubmissionDeferredError as error:
            result.deferred[submission.name] = str(error)


def check_site(site: Site) -> Iterator[Finding]:
    """Check for `manage.py doctor` whether jobs can run on Slurm. This takes up to a minute."""
    slurm = Slurm(CommandRunner(site.login, site.ssh_config))
    try:
        site.read_certificates()
    except OSError as error:
        words = f"Cannot read MESHBOARD_SLURM_CA_FILE: {error}"
        advice = "Set MESHBOARD_SLURM_CA_FILE to a file of certificates, or unset MESHBOARD_SLURM_CA_FILE."
        yield Finding("fail", DOCTOR_SUBJECT, words, advice)
    if site.board.startswith("http:") or "//localhost" in site.board:
        words = f"MESHBOARD_SLURM_BOARD is {site.board}, which is not an HTTPS address that nodes can reach"
        advice = "Set MESHBOARD_SLURM_BOARD to the https:// address at which nodes reach the board."
        yield Finding("fail", DOCTOR_SUBJECT, words, advice)
    try:
        slurm.list_jobs()
        slurm.make_folder(get_log_folder(site.folder))
        argv = [site.python, "-c", "import torch, workers.slurm"]
        python = slurm.runner.run(argv, deadline_s=COMMAND_TIMEOUT_S)
        if python.code:
            words = f"MESHBOARD_SLURM_PYTHON is {site.python}, which cannot import Meshboard: {python.complaint}"
            yield Finding("fail", DOCTOR_SUBJECT, words, "Install Meshboard for this Python: pip install '.[worker]'")
        if slurm.list_accounted_jobs([format_job_name("doctor", 1)]) is not None:
            yield Finding("ok", DOCTOR_SUBJECT, "Slurm accounting (sacct) is on")
        else:
            words = "Slurm accounting (sacct) is off, so Meshboard may not learn why a Slurm job ended"
            advice = "Set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf."
            yield Finding("warn", DOCTOR_SUBJECT, words, advice)
    except SlurmUnavailableError as error:
        advice = "Run the command by hand as the user of the board. See docs/howto/slurm.md."
        yield Finding("fail", DOCTOR_SUBJECT, str(error), advice)
