"""The processes of an attempt: torchrun under the guardian, TERM and KILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from contracts.control import LaunchOrder
from contracts.security import decrypt_variables
from workers import rank_environment
from workers.host.address import interface_of
from workers.host.apart.identity import as_user
from workers.host.apart.lending import give, lend
from workers.host.apart.sandbox import PACKAGES, has_own_network, sandbox_prefix
from workers.host.attempts import AttemptDir
from workers.host.guardian import namespace_prefix
from workers.host.processes import COOKIE, RUNS, sweep
from workers.host.settings import HostSettings
from workers.host.start.heap import heap_variables
from workers.host.start.programs import Folders, launch_command, program_of, stays_here

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
TERM_GRACE_S = 10.0
GUARDIAN_S = 0.5  # to end what is left; then it is ended itself


class Training:
    """torchrun and everything it started.

    Raises:
        SealError: what its project hands it cannot be opened here.
    """

    def __init__(self, attempt: AttemptDir, order: LaunchOrder, settings: HostSettings, telemetry_socket: str) -> None:
        self._attempt, self._order, self._settings = attempt, order, settings
        self._socket = telemetry_socket
        self._user = settings.job_user
        self._variables: dict[str, str] = {}
        if "variables" in order:
            self._variables = decrypt_variables(
                settings.signing_key, order["job"], order["attempt"], order["variables"]
            )
        self._lifeline, self._guardians_end = socket.socketpair()
        self.launcher, self._launchers_end = socket.socketpair()  # of a gang: what its launcher has as stdin

    async def start(self) -> None:
        """Start the guardian with torchrun below it."""
        prefix = self._sandboxed(self._hand_over())
        fd = self._guardians_end.fileno()
        torchrun = launch_command(self._order, self._attempt, self._settings, self._socket, self._attempt.failure)
        as_them = as_user(self._user, sandboxed=self._settings.sandbox == "bwrap")
        guardian = [sys.executable, "-m", "workers.host.guardian", str(fd), *as_them, *torchrun]
        stdin = self._launchers_end.fileno() if "gang" in self._order else asyncio.subprocess.DEVNULL
        with self._guardians_end, self._launchers_end, (self._attempt.logs / "launcher.log").open("ab") as launcher_log:
            self.process = await asyncio.create_subprocess_exec(
                *prefix,
                *guardian,
                cwd=self._attempt.work,
                env=self._environment(),
                pass_fds=(fd,),
                stdin=stdin,
                stdout=launcher_log,
                stderr=launcher_log,
                start_new_session=True,
            )

    def terminate(self) -> None:
        """Ask every rank to end."""
        with contextlib.suppress(OSError):  # it has ended already
            self._lifeline.send(b"t")

    async def wait(self) -> int:
        """The exit code of torchrun, -N when signal N ended it; nothing of the attempt is left when this returns."""
        await self.process.wait()
        self._lifeline.setblocking(False)
        said = b""
        with contextlib.suppress(OSError):
            said = self._lifeline.recv(16)
        self._lifeline.close()
        sweep(self._attempt.job, self._attempt.attempt, runs=self._attempt.run_dir)
        return int(said) if said else -signal.SIGKILL  # no word: killed together with its guardian

    async def stop(self) -> None:
        """TERM, TERM_GRACE_S, the guardian's own KILL, and ours where it does not answer: a stopped one cannot."""
        self.terminate()
        for grace_s, next_step in ((TERM_GRACE_S, self._hang_up), (GUARDIAN_S, self._kill)):
            try:
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.process.wait())
            except TimeoutError:
                next_step()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_WR)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        sweep(self._attempt.job, self._attempt.attempt, runs=self._attempt.run_dir)

    def _hand_over(self) -> Folders:
        """What the job may write to, made, and made its user's."""
        settings, user = self._settings, self._user
        folders = program_of(self._order).folders(settings, self._order)
        for folder in (self._attempt.logs, self._attempt.work, self._attempt.temporary, *folders.own):
            give(folder, user)
        for folder in folders.lent:
            lend(folder, settings.script_root, user)
        return folders

    def _sandboxed(self, folders: Folders) -> list[str]:
        """The start of the command; a namespace for its processes at least."""
        if self._settings.sandbox != "bwrap":
            return namespace_prefix()
        read = [self._attempt.spec, Path(self._socket).parent, *folders.read]
        written = [self._attempt.logs, self._attempt.work, *folders.own, *folders.lent]
        alone = self._attempt.own if stays_here(self._order) and has_own_network() else None
        places = (self._attempt.temporary, self._attempt.work)
        return sandbox_prefix(self._settings, read, written, *places, alone=alone)

    def _interface(self) -> str:
        """What ranks reach each other by: loopback, where all are here."""
        if "gang" not in self._order:
            return "lo"
        return interface_of(self._settings.address) or "lo"

    def _environment(self) -> dict[str, str]:
        """An allow-list, and what its project hands it: training code sees neither Redis nor any secret of ours."""
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= self._variables
        environment |= {
            COOKIE: f"{self._attempt.job}/{self._attempt.attempt}",
            RUNS: str(self._attempt.run_dir),
            "PYTHONPATH": str(PACKAGES),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            rank_environment.GROUP_TIMEOUT_VARIABLE: str(self._settings.group_timeout_s),
            # Not by the host's name, which need not resolve, or resolves to loopback.
            "GLOO_SOCKET_IFNAME": self._interface(),
            "NCCL_SOCKET_IFNAME": self._interface(),
        }
        if self._settings.saves_on_term:
            environment[rank_environment.TERM_FROM_PARENT_VARIABLE] = "1"
        if self._user is not None:
            environment |= {"USER": self._user.name}
        if self._user is not None or self._settings.sandbox == "bwrap":
            environment |= {"HOME": str(self._attempt.work)}
            environment.pop("TMPDIR", None)
        if self._settings.device == "cpu" and program_of(self._order).own_heap:
            environment |= heap_variables()
        if self._settings.device == "cuda":
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the host counts its slots
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot) for slot in self._order["slots"])
        return environment
