"""The processes of an attempt: torchrun under the guardian, TERM and KILL."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from contracts.control import LaunchOrder
from workers.host.attempts import AttemptDir, read_json
from workers.host.guardian import namespace_prefix
from workers.host.processes import COOKIE, sweep
from workers.host.programs import launch_command
from workers.host.settings import HostSettings

PACKAGES = Path(__file__).resolve().parents[3]
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
TERM_GRACE_S = 10.0


class Training:
    """torchrun and everything it started."""

    def __init__(self, attempt: AttemptDir, order: LaunchOrder, settings: HostSettings, telemetry_socket: str) -> None:
        self._attempt, self._order, self._settings = attempt, order, settings
        self._socket = telemetry_socket
        self._lifeline = -1
        self._failure = attempt.path / "failure.json"
        self._ended = attempt.path / "torchrun.json"

    async def start(self) -> None:
        """Start the guardian with torchrun below it."""
        read_end, self._lifeline = os.pipe()
        torchrun = launch_command(self._order, self._attempt, self._settings, self._socket, self._failure)
        guardian = [sys.executable, "-m", "workers.host.guardian", str(read_end), str(self._ended), *torchrun]
        launcher_log = (self._attempt.logs / "launcher.log").open("ab")
        try:
            self.process = await asyncio.create_subprocess_exec(
                *namespace_prefix(),
                *guardian,
                cwd=self._attempt.path,
                env=self._environment(),
                pass_fds=(read_end,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=launcher_log,
                stderr=launcher_log,
                start_new_session=True,
            )
        finally:
            os.close(read_end)
            launcher_log.close()

    def terminate(self) -> None:
        """Ask every rank to end."""
        os.write(self._lifeline, b"t")

    async def wait(self) -> int:
        """The exit code of torchrun, -N when signal N ended it; nothing of the attempt is left when this returns."""
        await self.process.wait()
        self._close_lifeline()
        sweep(self._attempt.job, self._attempt.attempt)
        code: int | None = read_json(self._ended)
        return -signal.SIGKILL if code is None else code  # no word of it: killed together with its guardian

    async def stop(self) -> None:
        """TERM, TERM_GRACE_S, KILL."""
        self.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self.process.wait()), TERM_GRACE_S)
        except TimeoutError:
            self._close_lifeline()

    def failure(self) -> dict[str, Any] | None:
        """What `workers.host.launch` wrote of the rank that failed first, when there is one."""
        found: dict[str, Any] | None = read_json(self._failure)
        return found

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _environment(self) -> dict[str, str]:
        """An allow-list: training code sees neither Redis nor any secret."""
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {
            COOKIE: f"{self._attempt.job}/{self._attempt.attempt}",
            "PYTHONPATH": str(PACKAGES),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host; its name need not resolve
            "NCCL_SOCKET_IFNAME": "lo",
        }
        if self._settings.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot) for slot in self._order["slots"])
        return environment
