"""One node of an external run: its command, the telemetry of its ranks, and its reports to the board.

The command never waits for the board. Telemetry that the board does not receive is kept in limited bytes. The exit
code of the command becomes the exit code of `meshboard-meter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from pathlib import Path, PurePath
from typing import Literal

from contracts.control import VERSION, AttemptReport, ExitReport, LaunchOrder
from contracts.telemetry.batches import Item
from contracts.telemetry.items import StartItem
from workers.external_runs.child_process import (
    ChildCommand,
    RestartCounter,
    handle_signals,
    parse_first_failure,
    print_message,
)
from workers.external_runs.command_line import LaunchPlan
from workers.external_runs.registration import BoardRun, RegistrationRequest, RunRefusedError, RunRegistration
from workers.host.attempts import AttemptDir
from workers.host.isolation import PACKAGE_ROOT
from workers.host.processes import COOKIE_VARIABLE, kill_processes
from workers.host.rank_files import get_signal_name
from workers.host.supervisor.exit_report import AttemptEnd, build_exit_report
from workers.host.supervisor.health import GaugeSampler
from workers.host.supervisor.http_transport import BoardClient, HttpTransport
from workers.host.supervisor.log_tail import LogTail
from workers.host.supervisor.memory_kills import MemoryKillWatch
from workers.host.supervisor.publisher import Publisher, TransportError
from workers.host.supervisor.telemetry_server import TelemetryServer
from workers.host.supervisor.telemetry_session import POLL_INTERVAL_S, TelemetrySession, cancel_tasks

SEND_INTERVAL_S = 0.5  # each batch is one request
TERM_TIMEOUT_S = 10.0
FAREWELL_TIMEOUT_S = 30.0
QUIET_FAREWELL_S = 2.0  # before the user sees why the command has not returned
FAREWELL_RETRY_S = 0.5
LOG_BYTES = 64 * 2**20  # per log file of a rank
LOCAL_NAME = "local"  # the name of the run on the telemetry socket, before the board assigns an ID
SECRET_VARIABLES = ("MESHBOARD_TOKEN", "MESHBOARD_RUN")


class NotMeteredError(Exception):
    """A run that cannot be metered on this machine. Its command was not started."""


class ExternalRun(TelemetrySession):
    """One node of an external run, from the start of its command to the last report.

    Args:
        node: number of this node, or None if only the ranks know it.
        node_name: name of this node.
        kind: kind of job.
        compared_group: planned name of a group of all ranks. Empty without a prediction.
    """

    transport: HttpTransport | None

    def __init__(
        self,
        launch: LaunchPlan,
        node: int | None,
        node_name: str,
        client: BoardClient,
        request: RegistrationRequest,
        folder: Path,
        kind: str,
        compared_group: str,
    ) -> None:
        super().__init__(range(1))
        self._launch, self._known_node, self._node_name, self._client = launch, node, node_name, client
        self._registration = RunRegistration(client, request, print_message)
        self._folder, self._logs = folder, folder / "logs"
        self._order = LaunchOrder(
            v=VERSION,
            job=LOCAL_NAME,
            attempt=1,
            spec={"kind": kind},
            slots=list(range(launch.nodes * launch.ranks)),
            expires=0.0,
        )
        self._restarts = RestartCounter()
        self._node: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._run: BoardRun | None = None
        self._received_signal: int | None = None
        self._compared_group = compared_group
        self._cookie = f"meter-{secrets.token_hex(6)}"

    async def run(self) -> int:
        """Run the command, and return its exit code, -N for signal N. Raises NotMeteredError, OSError."""
        started, log = time.time(), self._logs / "launcher.log"
        self._memory_kills = MemoryKillWatch()
        socket = self._folder / "telemetry"
        telemetry = TelemetryServer(self._order, self._receive, self.buffer.count_lost, self.monitor.record_contact)
        try:
            self._logs.mkdir()
            log.touch(0o600)
            server = await telemetry.start(socket, None)
        except OSError as error:
            raise NotMeteredError(str(error)) from None
        GaugeSampler({}, with_gpus=False).start(self._record_gauges)
        env, separate_logs = self._build_environment(socket), self._launch.separate_logs
        self._command = ChildCommand(self._launch.argv, env, log, separate_logs=separate_logs)
        self._record(StartItem(kind="start", rank=-1, time=time.time(), stage="spawned"))
        handle_signals(self._forward_signal)
        if self._known_node is not None:
            self._set_node(self._known_node)
        connecting = asyncio.create_task(self._connect())
        work = ((self._send, SEND_INTERVAL_S), (self._poll_cancel, POLL_INTERVAL_S))
        code = await self._collect(server, self._wait_for_command(), work)
        await self._say_farewell(connecting, self._build_exit_report(code, started))
        return code

    async def _wait_for_command(self) -> int:
        code = await asyncio.to_thread(self._command.wait)
        if not self._node.done():
            self._set_node(0)  # no rank has sent anything
        return code

    def _build_environment(self, socket: Path) -> dict[str, str]:
        """Return the command's environment with the address of the telemetry socket."""
        env = get_command_environment()
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        if "site-packages" not in PACKAGE_ROOT.parts and str(PACKAGE_ROOT) not in paths:
            paths.append(str(PACKAGE_ROOT))  # a checkout that is not installed
        if paths:
            env["PYTHONPATH"] = os.pathsep.join(paths)
        if self._launch.separate_logs:
            env.setdefault("PYTHONUNBUFFERED", "1")  # output goes through a file to the terminal
        if self._compared_group:
            env["MESHBOARD_COMPARE"] = self._compared_group
        return {**env, "MESHBOARD_TELEMETRY": str(socket), COOKIE_VARIABLE: f"{self._cookie}/1"}

    def _forward_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._received_signal = number
        self._command.send(number)

    async def _connect(self) -> None:
        """Register this node on the board, unless the board rejects it."""
        try:
            self._run = await self._registration.open()
            print_message(f"Run on the board: {self._run.url}" if self._run.url else f"Joining run {self._run.id}.")
            node = await asyncio.shield(self._node)
            member = await self._registration.join(self._run, node, self._node_name)
        except RunRefusedError as error:
            print_message(f"The board refused this run ({error}). Training continues without reports to the board.")
            return
        self.transport = HttpTransport(self._client, member, print_message)
        self.publisher = Publisher(member.run, member.attempt, self.buffer, self.transport, self._node_name, self.clock)
        await self._measure_clock()
        await self._try_report()

    def _get_ranks(self, node: int) -> range:
        return range(node * self._launch.ranks, (node + 1) * self._launch.ranks)

    def _set_node(self, node: int) -> None:
        ranks = self._get_ranks(node)
        self._set_ranks(ranks)
        self.tail = LogTail(self._logs, ranks, LOG_BYTES, frozenset({os.geteuid()}))
        self._node.set_result(node)

    async def _receive(self, items: list[Item]) -> None:
        """Process checked items of a rank. The first item defines the number of this node, if it is not known."""
        for item in items:
            if item["kind"] != "gap" and not self._node.done():
                self._set_node(item["rank"] // self._launch.ranks)
            if item["kind"] == "gap" or item["rank"] not in self._get_ranks(self._node.result()):
                self.buffer.count_lost(1)
                continue
            self._restarts.adjust(item)
            was_training = self.summary.training
            self._receive_item(item)
            if self.summary.training and not was_training:
                await self._try_report()

    async def _send(self) -> None:
        if self.publisher is not None:
            await self.publisher.send()

    async def _report(self) -> None:
        if self.transport is None or self._run is None:
            return
        has_begun = self.summary.training or not self._launch.metered
        state: Literal["running", "starting"] = "running" if has_begun else "starting"
        report = AttemptReport(job=self._run.id, attempt=self._run.attempt, state=state, slots=[])
        await self.transport.send_report(report)

    async def _poll_cancel(self) -> None:
        if self.transport is None or self.ended_by is not None:
            return
        with contextlib.suppress(TransportError):
            if await self.transport.is_cancelled():
                print_message("Cancelled on the board. Stopping the command.")
                self.ended_by = "cancelled"
                self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """Send TERM, and KILL after TERM_TIMEOUT_S, to everything that the command started."""
        self._command.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERM_TIMEOUT_S):
                await self._finished.wait()
            return
        await asyncio.to_thread(kill_processes, self._cookie, 1)

    def _build_exit_report(self, code: int, started: float) -> ExitReport:
        assert self.tail is not None, "the node is known"
        ended_by, reason = self.ended_by, "cancelled on request"
        if ended_by is None and self._received_signal is not None and code != 0:
            ended_by = "cancelled"
            reason = f"ended by {signal.Signals(self._received_signal).name} on the machine that launched it"
        ranks = self._get_ranks(self._node.result())
        failure = None if ended_by else parse_first_failure(self._command.failure_line, self._logs, ranks)
        if ended_by is None and failure is None and code != 0:
            program = PurePath(self._launch.argv[0]).name
            signal_name = get_signal_name(code)
            how = f"was killed by {signal_name}" if signal_name else f"ended with exit code {code}"
            after = f" after step {self.summary.steps}" if self.summary.steps else ""
            ended_by, reason = "failed", f"{program} {how}{after}"
        end = AttemptEnd(code, failure, ended_by, reason, started, self.clock.offset_s, memory_kills=self._memory_kills)
        attempt = AttemptDir(self._folder, LOCAL_NAME, 1)
        return build_exit_report(attempt, self._order, end, self.summary, self.tail)

    async def _say_farewell(self, connecting: asyncio.Task[None], exit_report: ExitReport) -> None:
        """Send the rest and the exit report. A signal ends the wait for the board."""
        loop = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        handle_signals(lambda _number: loop.call_soon_threadsafe(interrupted.set))
        sending = asyncio.create_task(self._send_rest(connecting, exit_report))
        interrupt = asyncio.create_task(interrupted.wait())
        await asyncio.wait([sending, interrupt], timeout=QUIET_FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done() and not interrupt.done():
            wait_s = FAREWELL_TIMEOUT_S
            print_message(
                f"Reporting the end of the run to the board, for at most {wait_s:.0f} s. Ctrl-C stops the wait."
            )
            await asyncio.wait([sending, interrupt], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            print_message("The board did not receive the end of the run.")
        await cancel_tasks([task for task in (sending, interrupt, connecting) if not task.done()])

    async def _send_rest(self, connecting: asyncio.Task[None], exit_report: ExitReport) -> None:
        """Send the remaining telemetry, then the exit report, which ends the run on the board."""
        await asyncio.wait([connecting])
        if self.transport is None or self.publisher is None or self._run is None:
            return  # the board has rejected the run
        exit_report["job"], exit_report["attempt"] = self._run.id, self._run.attempt
        report = AttemptReport(job=self._run.id, attempt=self._run.attempt, state="exited", slots=[], exit=exit_report)
        deadline = time.monotonic() + FAREWELL_TIMEOUT_S
        while not self.transport.ended:
            with contextlib.suppress(TransportError):
                if await self.publisher.send_last(late=time.monotonic() >= deadline):
                    await self.transport.renew_stream()
                    await self.transport.send_report(report)
                    break
            await asyncio.sleep(FAREWELL_RETRY_S)
        await self.transport.close()


def get_command_environment() -> dict[str, str]:
    """Return the environment for the command, without secrets."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
