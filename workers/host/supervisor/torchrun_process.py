"""torchrun and all processes of an attempt, below a guardian: start, TERM, and KILL."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from contracts.control import LaunchOrder
from contracts.security import decrypt_variables
from contracts.traces import TRACEPARENT_VARIABLE, build_traceparent
from workers import rank_environment
from workers.host.attempts import AttemptDir
from workers.host.guardian import build_namespace_prefix
from workers.host.hardware import find_interface
from workers.host.isolation import (
    PACKAGE_ROOT,
    build_sandbox_prefix,
    build_user_prefix,
    can_unshare_network,
    make_owned_folder,
    share_folder,
)
from workers.host.job_limits import JobLimits
from workers.host.processes import COOKIE_VARIABLE, RUN_DIR_VARIABLE, kill_processes
from workers.host.programs import (
    JobFolders,
    build_launch_command,
    get_heap_variables,
    get_program,
    needs_only_this_host,
)
from workers.host.settings import HostSettings

PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
TERM_TIMEOUT_S = 10.0
GUARDIAN_TIMEOUT_S = 0.5  # for the guardian to kill all processes


class TorchrunProcess:
    """torchrun and everything that it starts. Raises DecryptionError."""

    def __init__(
        self, attempt: AttemptDir, order: LaunchOrder, settings: HostSettings, telemetry_socket: str, limits: JobLimits
    ) -> None:
        self._attempt, self._order, self._settings, self._limits = attempt, order, settings, limits
        self._socket = telemetry_socket
        self._user = settings.job_user
        self._variables: dict[str, str] = {}
        if "variables" in order:
            self._variables = decrypt_variables(
                settings.signing_key, order["job"], order["attempt"], order["variables"]
            )
        self._guardian, self._guardian_end = socket.socketpair()
        self.launcher, self._launcher_end = socket.socketpair()  # stdin of the launcher, in a multi-host job

    async def start(self) -> None:
        """Start the guardian, with torchrun below it. Raises OSError."""
        sandboxed = self._settings.sandbox == "bwrap"
        folders = self._prepare_folders()
        prefix = self._build_sandbox_prefix(folders) if sandboxed else build_namespace_prefix()
        descriptor = self._guardian_end.fileno()
        torchrun = build_launch_command(self._order, self._attempt, self._settings, self._socket)
        command = [
            *(*prefix, sys.executable, "-m", "workers.host.guardian", str(descriptor)),
            *build_user_prefix(self._user, sandboxed=sandboxed),
            *torchrun,
        ]
        self._limits.prepare()
        stdin = self._launcher_end.fileno() if "gang" in self._order else asyncio.subprocess.DEVNULL
        with self._guardian_end, self._launcher_end, (self._attempt.logs / "launcher.log").open("ab") as log:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *command,
                    cwd=self._attempt.work,
                    env=self._build_environment(),
                    pass_fds=(descriptor,),
                    stdin=stdin,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=self._limits.enter,
                )
            except subprocess.SubprocessError:
                raise OSError(errno.EAGAIN, "cannot set the limits of the job") from None

    def terminate(self) -> None:
        """Send TERM to every rank."""
        with contextlib.suppress(OSError):  # the guardian has ended
            self._guardian.send(b"t")

    async def wait(self) -> int:
        """Return the exit code of torchrun, -N for signal N, after all processes of the attempt have ended."""
        await self.process.wait()
        self._guardian.setblocking(False)
        code = b""
        with contextlib.suppress(OSError):
            code = self._guardian.recv(16)
        self._guardian.close()
        self._kill_all()
        return int(code) if code else -signal.SIGKILL  # without a code, torchrun was killed with its guardian

    async def stop(self) -> None:
        """Send TERM. After TERM_TIMEOUT_S, let the guardian kill, and kill here if the guardian does not respond."""
        self.terminate()
        for timeout_s, next_step in ((TERM_TIMEOUT_S, self._close_guardian), (GUARDIAN_TIMEOUT_S, self._kill)):
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self.process.wait())
            except TimeoutError:
                next_step()

    def kill(self) -> None:
        """Send KILL to all processes, without time for a last step."""
        self._limits.kill()
        self._kill()

    def _close_guardian(self) -> None:
        with contextlib.suppress(OSError):
            self._guardian.shutdown(socket.SHUT_WR)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self._kill_all()

    def _kill_all(self) -> None:
        kill_processes(self._attempt.job, self._attempt.attempt, run_dir=self._attempt.run_dir)

    def _prepare_folders(self) -> JobFolders:
        """Create the folders that the job writes to, for its user."""
        folders = get_program(self._order).folders(self._settings, self._order)
        environment = [self._attempt.environment] if "upload" in self._order else []
        for folder in (self._attempt.logs, self._attempt.work, self._attempt.tmp, *environment, *folders.owned):
            make_owned_folder(folder, self._user)
        for folder in folders.shared:
            share_folder(folder, self._settings.script_root, self._user)
        return folders

    def _build_sandbox_prefix(self, folders: JobFolders) -> list[str]:
        read = [self._attempt.spec, Path(self._socket).parent, *folders.read]
        own = (self._attempt.logs, self._attempt.work, self._attempt.upload, self._attempt.environment)
        written = [*own, *folders.owned, *folders.shared]
        has_private_network = needs_only_this_host(self._order) and can_unshare_network()
        private_network = self._attempt.host_dir if has_private_network else None
        tmp, cwd = self._attempt.tmp, self._attempt.work
        return build_sandbox_prefix(self._settings, read, written, tmp, cwd, private_network=private_network)

    def _build_environment(self) -> dict[str, str]:
        """Return the passed variables and those of the project. The job sees no secret of the host."""
        env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        # By the name of the interface: the name of the host can be unknown, or resolve to loopback.
        interface = find_interface(self._settings.address) or "lo" if "gang" in self._order else "lo"
        env |= self._variables | {
            COOKIE_VARIABLE: f"{self._attempt.job}/{self._attempt.attempt}",
            RUN_DIR_VARIABLE: str(self._attempt.run_dir),
            "PYTHONPATH": str(PACKAGE_ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            rank_environment.GROUP_TIMEOUT_VARIABLE: str(self._settings.group_timeout_s),
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
        }
        if "trace" in self._order:
            env[TRACEPARENT_VARIABLE] = build_traceparent(
                self._order["trace"], self._attempt.job, self._attempt.attempt
            )
        if self._settings.saves_on_term:
            env[rank_environment.TERM_FROM_PARENT_VARIABLE] = "1"
        if self._user is not None:
            env["USER"] = self._user.name
        if self._user is not None or self._settings.sandbox == "bwrap":
            env["HOME"] = str(self._attempt.work)
            env.pop("TMPDIR", None)
        if self._settings.device == "cpu" and get_program(self._order).own_heap:
            env |= get_heap_variables()
        if self._settings.device == "cuda":
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of the host's slots
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._order["slots"]))
        return env
