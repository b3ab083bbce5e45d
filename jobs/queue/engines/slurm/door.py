"""The way to Slurm's commands: on this machine, or over SSH on a login node. Each call has a deadline."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
