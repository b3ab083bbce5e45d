"""Slurm's commands, each with what its failure means. Nothing here knows the database.

The way to Slurm's commands: on this machine, or over SSH on a login node. Each call has a deadline.

One round of talk at a time, in a thread: Slurm and the way to it may hang, the controller may not.

One round of talk with Slurm: what runs, then what is to start and to end. No database: it may take its time.

Check whether jobs can run on Slurm from this server, for `manage.py doctor`.
"""

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

ASK_S = 20.0
SUBMIT_S = 30.0
REMEMBERED = "now-7days"  # how far back sacct looks for an attempt whose id nobody noted
AT_ONCE = 100  # ids or names in one command
TAIL_BYTES = 2000
# What sbatch says where it could not even be refused; as it may have been taken all the same, its name is looked up
# before it is sent again.
UNREACHED = re.compile(
    r"unable to contact|timed out|connect failure|connection refused|zero bytes|standby|"
    r"communications? (connection|failure)|authentication",
    re.IGNORECASE,
)
# What it says of one job's limits: the words for those that pass are those for those that do not.
NOT_NOW = re.compile(r"temporarily|try again|submit limit|submitlimit|too many", re.IGNORECASE)


class SubmissionRejectedError(Exception):
    """Slurm will never take what was submitted; the message is its own."""


class SubmissionDeferredError(Exception):
    """Slurm answered and did not take this job, and may another time; the message is its own."""


class Slurm(NamedTuple):
    """What is asked of Slurm, through one door."""

    runner: CommandRunner

    def list_jobs(self) -> list[SlurmJob]:
        """Every job of ours that slurmctld remembers: those that ended, for some minutes. Raises AwayError."""
        argv = ["squeue", "--me", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}"]
        return parse_squeue(self._asked(argv))

    def list_accounted_jobs(self, names: Sequence[str]) -> list[SlurmJob] | None:
        """What the accounts know of jobs by their names, None where Slurm keeps no accounts. Raises AwayError."""
        found = []
        for begin in range(0, len(names), AT_ONCE):
            some = ",".join(names[begin : begin + AT_ONCE])
            argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--starttime={REMEMBERED}"]
            said = self.runner.run([*argv, f"--format={SACCT_FORMAT}", f"--name={some}"], deadline_s=ASK_S)
            if said.code and "storage is disabled" in said.complaint:
                return None
            if said.code:
                raise SlurmUnavailableError(f"sacct: {said.complaint}")
            found += parse_sacct(said.out)
        return found

    def submit(self, options: Sequence[str], script: str) -> str:
        """The id of the job that will run the script.

        Raises:
            AwayError: whether it was taken nobody knows.
            NotNowError: it was not, and may be later.
            RefusedError: it never will be.
        """
        said = self.runner.run(["sbatch", "--parsable", *options], stdin=script, deadline_s=SUBMIT_S)
        job = said.out.strip().partition(";")[0]  # "17;cluster"
        if said.code == 0 and job.isascii() and job.isdigit():
            return job
        if said.code == 0 or "sbatch: error: " not in said.complaint or UNREACHED.search(said.complaint):
            raise SlurmUnavailableError(f"sbatch: {said.complaint}")
        if NOT_NOW.search(said.complaint):
            raise SubmissionDeferredError(said.complaint)  # whole: the limit has a line of its own
        raise SubmissionRejectedError(
            said.complaint.rpartition("submission failed: ")[2].removeprefix("sbatch: error: ")
        )

    def cancel(self, jobs: Collection[str]) -> None:
        """End them; one that has ended already is none the worse. Raises AwayError."""
        ids = sorted(jobs)
        for begin in range(0, len(ids), AT_ONCE):
            said = self.runner.run(["scancel", "--quiet", *ids[begin : begin + AT_ONCE]], deadline_s=ASK_S)
            if said.code and UNREACHED.search(said.complaint):
                raise SlurmUnavailableError(f"scancel: {said.complaint}")

    def hold(self, jobs: Collection[str]) -> None:
        """Have none of them begin until it is released; one that has begun goes on. Raises AwayError."""
        self._control("uhold", jobs)

    def release(self, jobs: Collection[str]) -> None:
        """Let what was held begin. Raises AwayError."""
        self._control("release", jobs)

    def make_folder(self, folder: str) -> None:
        """Have the folder there; without it Slurm starts nothing that logs to it. Raises AwayError."""
        said = self.runner.run(["mkdir", "-p", "--", folder], deadline_s=ASK_S)
        if said.code:
            raise SlurmUnavailableError(f"mkdir: {said.complaint}")

    def read_tail(self, path: str) -> str:
        """The end of a file on the cluster, empty where it cannot be read. Raises AwayError."""
        said = self.runner.run(["tail", "-c", str(TAIL_BYTES), "--", path], deadline_s=ASK_S)
        return said.out.replace("\0", "") if said.code == 0 else ""  # PostgreSQL's texts have none

    def _control(self, action: str, jobs: Collection[str]) -> None:
        ids = sorted(jobs)
        for begin in range(0, len(ids), AT_ONCE):
            said = self.runner.run(["scontrol", action, ",".join(ids[begin : begin + AT_ONCE])], deadline_s=ASK_S)
            if said.code and UNREACHED.search(said.complaint):
                raise SlurmUnavailableError(f"scontrol: {said.complaint}")

    def _asked(self, argv: list[str]) -> str:
        said = self.runner.run(argv, deadline_s=ASK_S)
        if said.code:
            raise SlurmUnavailableError(f"{argv[0]}: {said.complaint}")
        return said.out


PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF")  # never a secret of the board
IN_UTC = ("env", "TZ=UTC")  # Slurm prints times without their zone
SSH_FAILED = 255  # ssh's own failure, and none of what it ran
MOST_TOLD = 500  # characters of what a command complained of
IDLE_S = 120  # after which a connection to the login node that nobody uses ends


class SlurmUnavailableError(Exception):
    """Slurm cannot be asked now; the message says why."""


class CommandResult(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What it said of its failure, on one line."""
        told = " ".join((self.err.strip() or self.out.strip()).replace("\0", "").split())
        return told[-MOST_TOLD:] or f"exit code {self.code}"


class CommandRunner(NamedTuple):
    """`login` is user@host, empty for this machine; `ssh_config` a file that tells ssh how to get there."""

    login: str = ""
    ssh_config: str = ""

    def run(self, argv: Sequence[str], *, deadline_s: float, stdin: str = "") -> CommandResult:
        """Run a command; `told` is its standard input.

        Raises:
            AwayError: it is not there, the login node cannot be reached, or the deadline has passed.
        """
        where = f" on {self.login}" if self.login else ""
        command = [*IN_UTC, *argv]
        try:
            done = subprocess.run(
                [*self._ssh(), shlex.join(command)] if self.login else command,
                input=stdin.encode(),
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                capture_output=True,
                timeout=deadline_s,
                check=False,
                start_new_session=True,  # a Ctrl-C is for the controller
            )
        except subprocess.TimeoutExpired:
            raise SlurmUnavailableError(
                f"the command {argv[0]}{where} did not answer within {deadline_s:.0f} s"
            ) from None
        except OSError as error:
            raise SlurmUnavailableError(
                f"the command {argv[0]}{where} cannot start: {error.strerror or error}"
            ) from None
        said = CommandResult(
            done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        )
        if self.login and said.code == SSH_FAILED:
            raise SlurmUnavailableError(f"Cannot reach the login node {self.login}: {said.complaint}")
        if said.code in (126, 127):  # what env and a shell say of a command that they cannot start
            raise SlurmUnavailableError(f"the command {argv[0]}{where} cannot start: {said.complaint}")
        return said

    def _ssh(self) -> list[str]:
        """One connection is kept and shared by all commands: a new one takes the login node seconds."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ControlMaster": "auto",
            "ControlPath": f"{_sockets()}/%C",
            "ControlPersist": str(IDLE_S),
        }
        told = ["-F", self.ssh_config] if self.ssh_config else []
        return ["ssh", "-T", *told, *(f"-o{name}={value}" for name, value in options.items()), "--", self.login]


def _sockets() -> Path:
    """A folder that is ours alone, short enough for a socket's path; whoever can write there could pose as us.

    Raises:
        AwayError: somebody else has it.
    """
    folder = Path(tempfile.gettempdir()) / f"meshboard-ssh-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise SlurmUnavailableError(f"Other users can access the folder {folder}. Run chmod 700 on this folder.")
    return folder


class PollingThread:
    """At most one is under way. A thread that is left behind holds nothing of ours and ends by its deadlines."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._news: PollResult | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], PollResult]) -> None:
        """Start a round; there is none under way."""
        assert not self.busy

        def run() -> None:
            try:
                self._news = work()
            except Exception as error:  # for the controller's own log, which tells of it once a minute
                self._error = error

        self._thread = threading.Thread(target=run, name="slurm", daemon=True)
        self._thread.start()

    def collect(self, patience_s: float = 0.0) -> PollResult | None:
        """What a round brought, once; None while it goes on. Raises what ended it."""
        if self._thread is not None:
            self._thread.join(patience_s)
        if self.busy:
            return None
        news, error, self._news, self._error = self._news, self._error, None, None
        if error is not None:
            raise error
        return news


MAX_SUBMISSIONS_PER_POLL = 20  # in one round: each is a call of its own, and all else waits for it


class PollRequest(NamedTuple):
    """What the database asks for, by the names of attempts in Slurm. `known`: those to follow, with the id that was
    noted or "". `start`: those to submit. `end`: those to cancel. `hold` and `free`: those that are not to begin, and
    those that were held and may. `logs`: the files to read the end of, of those that may fail before a supervisor
    speaks."""

    followed: Mapping[str, str]
    submissions: tuple[Submission, ...] = ()
    cancel: frozenset[str] = frozenset()
    hold: frozenset[str] = frozenset()
    release: frozenset[str] = frozenset()
    logs: Mapping[str, str] = {}
    folder: str = ""


@dataclass
class PollResult:
    """What a round brought. `trouble` says why it is not whole: what is not told then is not known."""

    jobs: dict[str, SlurmJob] = field(default_factory=dict)  # by name, the one that counts
    absent: frozenset[str] = frozenset()  # names that Slurm has no job of, when it was looked at
    accounts: bool = True  # whether Slurm keeps any; where it does not, what slurmctld forgot nobody knows
    logs: dict[str, str] = field(default_factory=dict)
    submitted: dict[str, str] = field(default_factory=dict)  # name -> id
    rejected: dict[str, str] = field(default_factory=dict)  # name -> why
    deferred: dict[str, str] = field(default_factory=dict)  # name -> why not now
    trouble: str = ""


def poll(slurm: Slurm, wants: PollRequest) -> PollResult:
    """A whole round, or as far as Slurm answers."""
    news = PollResult()
    try:
        _look(slurm, wants, news)
        _start(slurm, wants, news)
    except SlurmUnavailableError as error:
        news.trouble = str(error)
    return news


def _look(slurm: Slurm, wants: PollRequest, news: PollResult) -> None:
    """Which job of Slurm's is which attempt. Of two by one name, the one that was noted counts and the other ends."""
    told: dict[str, list[SlurmJob]] = {}
    for job in slurm.list_jobs():
        if job.name in wants.followed:
            told.setdefault(job.name, []).append(job)
    unseen = [name for name in wants.followed if name not in told]
    for job in _remembered(slurm, wants, unseen, news):
        told.setdefault(job.name, []).append(job)
    strangers: list[SlurmJob] = []
    for name, found in told.items():
        chosen = _chosen(found, wants.followed[name])
        strangers += [job for job in found if job is not chosen]
        if chosen is not None:
            news.jobs[name] = chosen
    news.absent = frozenset(wants.followed).difference(news.jobs, unseen if news.trouble else ())
    ending = {job.id for name, job in news.jobs.items() if name in wants.cancel}
    alive = {job.id for job in (*strangers, *news.jobs.values()) if not has_ended(job)}
    if unwanted := alive & (ending | {job.id for job in strangers}):
        slurm.cancel(unwanted)
    _hold(slurm, wants, [job for job in news.jobs.values() if job.state == "PENDING"])
    for name, job in news.jobs.items():
        if name in wants.logs and job.state == "FAILED":
            news.logs[name] = slurm.read_tail(wants.logs[name])


def _hold(slurm: Slurm, wants: PollRequest, pending: list[SlurmJob]) -> None:
    if barred := {job.id for job in pending if job.name in wants.hold and not job.reason.startswith(HELD)}:
        slurm.hold(barred)
    if free := {job.id for job in pending if job.name in wants.release and job.reason == HELD_BY_USER}:
        slurm.release(free)


def _remembered(slurm: Slurm, wants: PollRequest, unseen: list[str], news: PollResult) -> list[SlurmJob]:
    """Of jobs that slurmctld does not know, those whose end the accounts have.

    One that runs by the accounts alone was forgotten before its end was written down: what was noted is gone then,
    while another controller may just have submitted what was not.
    """
    try:
        found = slurm.list_accounted_jobs(unseen) if unseen else []
    except SlurmUnavailableError as error:  # slurmctld does without them: what it told counts
        news.trouble = str(error)
        return []
    news.accounts = found is not None
    return [job for job in found or [] if has_ended(job) or not wants.followed[job.name]]


def _chosen(found: list[SlurmJob], noted: str) -> SlurmJob | None:
    """The noted one; where none was noted the first, which runs before any other of its name."""
    if noted:
        return next((job for job in found if job.id == noted), None)
    return min(found, key=lambda job: int(job.id))


def _start(slurm: Slurm, wants: PollRequest, news: PollResult) -> None:
    """Submit what Slurm does not have by its name: who was cut off after sbatch and before noting finds it so."""
    new = [asked for asked in wants.submissions if asked.name in news.absent][:MAX_SUBMISSIONS_PER_POLL]
    if new:
        slurm.make_folder(get_log_folder(wants.folder))
    for asked in new:
        try:
            news.submitted[asked.name] = slurm.submit(asked.options, asked.script)
        except SubmissionRejectedError as error:
            news.rejected[asked.name] = str(error)
        except SubmissionDeferredError as error:
            news.deferred[asked.name] = str(error)


SUBJECT = "Slurm"


def check_site(site: Site) -> Iterator[Finding]:
    """What keeps jobs from running there, and what of them could not be told. Takes up to a minute."""
    slurm = Slurm(CommandRunner(site.login, site.ssh_config))
    try:
        site.certificates()
    except OSError as error:
        yield Finding(
            "fail",
            SUBJECT,
            f"Cannot read MESHBOARD_SLURM_CA_FILE: {error}",
            "Set MESHBOARD_SLURM_CA_FILE to a file of certificates, or unset MESHBOARD_SLURM_CA_FILE.",
        )
    if site.board.startswith("http:") or "//localhost" in site.board:
        words = f"MESHBOARD_SLURM_BOARD is {site.board}, which is not an HTTPS address that nodes can reach"
        yield Finding(
            "fail", SUBJECT, words, "Set MESHBOARD_SLURM_BOARD to the https:// address at which nodes reach the board."
        )
    try:
        slurm.list_jobs()
        slurm.make_folder(get_log_folder(site.folder))
        python = slurm.runner.run([site.python, "-c", "import torch, workers.slurm"], deadline_s=ASK_S)
        if python.code:
            words = f"MESHBOARD_SLURM_PYTHON is {site.python}, which cannot import Meshboard: {python.complaint}"
            yield Finding("fail", SUBJECT, words, "Install Meshboard for this Python: pip install '.[worker]'")
        yield _accounts(slurm)
    except SlurmUnavailableError as error:
        yield Finding(
            "fail", SUBJECT, str(error), "Run the command by hand as the user of the board. See docs/howto/slurm.md."
        )


def _accounts(slurm: Slurm) -> Finding:
    """Raises AwayError."""
    if slurm.list_accounted_jobs([format_job_name("doctor", 1)]) is not None:
        return Finding("ok", SUBJECT, "Slurm accounting (sacct) is on")
    words = "Slurm accounting (sacct) is off, so Meshboard may not learn why a Slurm job ended"
    return Finding("warn", SUBJECT, words, "Set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf.")
