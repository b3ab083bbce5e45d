"""Slurm's commands, each with what its failure means. Nothing here knows the database.

The way to Slurm's commands: on this machine, or over SSH on a login node. Each call has a deadline.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from jobs.queue.engines.slurm.states import SACCT_FORMAT, SQUEUE_FORMAT, SlurmJob, accounted, rows

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


class RefusedError(Exception):
    """Slurm will never take what was submitted; the message is its own."""


class NotNowError(Exception):
    """Slurm answered and did not take this job, and may another time; the message is its own."""


class Slurm(NamedTuple):
    """What is asked of Slurm, through one door."""

    door: Door

    def jobs(self) -> list[SlurmJob]:
        """Every job of ours that slurmctld remembers: those that ended, for some minutes. Raises AwayError."""
        argv = ["squeue", "--me", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}"]
        return rows(self._asked(argv))

    def remembered(self, names: Sequence[str]) -> list[SlurmJob] | None:
        """What the accounts know of jobs by their names, None where Slurm keeps no accounts. Raises AwayError."""
        found = []
        for begin in range(0, len(names), AT_ONCE):
            some = ",".join(names[begin : begin + AT_ONCE])
            argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", f"--starttime={REMEMBERED}"]
            said = self.door.run([*argv, f"--format={SACCT_FORMAT}", f"--name={some}"], deadline_s=ASK_S)
            if said.code and "storage is disabled" in said.complaint:
                return None
            if said.code:
                raise AwayError(f"sacct: {said.complaint}")
            found += accounted(said.out)
        return found

    def submit(self, options: Sequence[str], script: str) -> str:
        """The id of the job that will run the script.

        Raises:
            AwayError: whether it was taken nobody knows.
            NotNowError: it was not, and may be later.
            RefusedError: it never will be.
        """
        said = self.door.run(["sbatch", "--parsable", *options], told=script, deadline_s=SUBMIT_S)
        job = said.out.strip().partition(";")[0]  # "17;cluster"
        if said.code == 0 and job.isascii() and job.isdigit():
            return job
        if said.code == 0 or "sbatch: error: " not in said.complaint or UNREACHED.search(said.complaint):
            raise AwayError(f"sbatch: {said.complaint}")
        if NOT_NOW.search(said.complaint):
            raise NotNowError(said.complaint)  # whole: the limit has a line of its own
        raise RefusedError(said.complaint.rpartition("submission failed: ")[2].removeprefix("sbatch: error: "))

    def cancel(self, jobs: Collection[str]) -> None:
        """End them; one that has ended already is none the worse. Raises AwayError."""
        ids = sorted(jobs)
        for begin in range(0, len(ids), AT_ONCE):
            said = self.door.run(["scancel", "--quiet", *ids[begin : begin + AT_ONCE]], deadline_s=ASK_S)
            if said.code and UNREACHED.search(said.complaint):
                raise AwayError(f"scancel: {said.complaint}")

    def hold(self, jobs: Collection[str]) -> None:
        """Have none of them begin until it is released; one that has begun goes on. Raises AwayError."""
        self._control("uhold", jobs)

    def release(self, jobs: Collection[str]) -> None:
        """Let what was held begin. Raises AwayError."""
        self._control("release", jobs)

    def make(self, folder: str) -> None:
        """Have the folder there; without it Slurm starts nothing that logs to it. Raises AwayError."""
        said = self.door.run(["mkdir", "-p", "--", folder], deadline_s=ASK_S)
        if said.code:
            raise AwayError(f"mkdir: {said.complaint}")

    def tail(self, path: str) -> str:
        """The end of a file on the cluster, empty where it cannot be read. Raises AwayError."""
        said = self.door.run(["tail", "-c", str(TAIL_BYTES), "--", path], deadline_s=ASK_S)
        return said.out.replace("\0", "") if said.code == 0 else ""  # PostgreSQL's texts have none

    def _control(self, action: str, jobs: Collection[str]) -> None:
        ids = sorted(jobs)
        for begin in range(0, len(ids), AT_ONCE):
            said = self.door.run(["scontrol", action, ",".join(ids[begin : begin + AT_ONCE])], deadline_s=ASK_S)
            if said.code and UNREACHED.search(said.complaint):
                raise AwayError(f"scontrol: {said.complaint}")

    def _asked(self, argv: list[str]) -> str:
        said = self.door.run(argv, deadline_s=ASK_S)
        if said.code:
            raise AwayError(f"{argv[0]}: {said.complaint}")
        return said.out


PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF")  # never a secret of the board
IN_UTC = ("env", "TZ=UTC")  # Slurm prints times without their zone
SSH_FAILED = 255  # ssh's own failure, and none of what it ran
MOST_TOLD = 500  # characters of what a command complained of
IDLE_S = 120  # after which a connection to the login node that nobody uses ends


class AwayError(Exception):
    """Slurm cannot be asked now; the message says why."""


class Said(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What it said of its failure, on one line."""
        told = " ".join((self.err.strip() or self.out.strip()).replace("\0", "").split())
        return told[-MOST_TOLD:] or f"exit code {self.code}"


class Door(NamedTuple):
    """`login` is user@host, empty for this machine; `ssh_config` a file that tells ssh how to get there."""

    login: str = ""
    ssh_config: str = ""

    def run(self, argv: Sequence[str], *, deadline_s: float, told: str = "") -> Said:
        """Run a command; `told` is its standard input.

        Raises:
            AwayError: it is not there, the login node cannot be reached, or the deadline has passed.
        """
        where = f" on {self.login}" if self.login else ""
        command = [*IN_UTC, *argv]
        try:
            done = subprocess.run(
                [*self._ssh(), shlex.join(command)] if self.login else command,
                input=told.encode(),
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ},
                capture_output=True,
                timeout=deadline_s,
                check=False,
                start_new_session=True,  # a Ctrl-C is for the controller
            )
        except subprocess.TimeoutExpired:
            raise AwayError(f"the command {argv[0]}{where} did not answer within {deadline_s:.0f} s") from None
        except OSError as error:
            raise AwayError(f"the command {argv[0]}{where} cannot start: {error.strerror or error}") from None
        said = Said(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))
        if self.login and said.code == SSH_FAILED:
            raise AwayError(f"Cannot reach the login node {self.login}: {said.complaint}")
        if said.code in (126, 127):  # what env and a shell say of a command that they cannot start
            raise AwayError(f"the command {argv[0]}{where} cannot start: {said.complaint}")
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
        raise AwayError(f"Other users can access the folder {folder}. Run chmod 700 on this folder.")
    return folder
