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
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Literal

from contracts.control import VERSION, AttemptReport, ExitReport, LaunchOrder
from contracts.telemetry.batches import Item
from contracts.telemetry.items import StartItem
from planner.facts.kinds import get_kind_rules
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
from workers.host.hook import NOT_METERED_NOTE, build_hook_variables
from workers.host.isolation import PACKAGE_ROOT
from workers.host.processes import COOKIE_VARIABLE, kill_processes
from workers.host.rank_files import get_signal_name
from workers.host.supervisor.exit_report import AttemptEnd, build_exit_report
from workers.host.supervisor.health import GaugeSampler
from workers.host.supervisor.http_transport import BoardClient, HttpTransport
from workers.host.supervisor.log_metrics import LogMetrics
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
MAX_RANKS = 1024  # of a command whose number of ranks is not known before
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
        rank_timeout_s: time for the first rank to report, after which the run is shown without ranks.
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
        rank_timeout_s: float,
    ) -> None:
        super().__init__(range(1))
        self._launch, self._known_node, self._node_name, self._client = launch, node, node_name, client
        self._request = request
        self._folder, self._logs = folder, folder / "logs"
        self._order = LaunchOrder(
            v=VERSION,
            job=LOCAL_NAME,
            attempt=1,
            spec={"kind": kind},
            slots=list(range(launch.nodes * (launch.ranks or MAX_RANKS))),
            expires=0.0,
        )
        self._restarts = RestartCounter()
        self._nodes, self._ranks = launch.nodes, launch.ranks or 1  # ranks of each node, final after `_sized`
        self._sized = asyncio.Event()
        self._has_metered, self._note = False, ""
        self._rank_timeout_s, self._has_warned = rank_timeout_s, False
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
        env, has_rank_logs = self._build_environment(socket), bool(self._launch.log_variables)
        self._command = ChildCommand(self._launch.argv, env, log, separate_logs=has_rank_logs)
        self._record(StartItem(kind="start", rank=-1, time=time.time(), stage="spawned"))
        handle_signals(self._forward_signal)
        if self._launch.ranks is not None:
            self._sized.set()
            if self._known_node is not None:
                self._set_node(self._known_node)
        waiting = asyncio.create_task(self._report_missing_ranks())
        connecting = asyncio.create_task(self._connect())
        work = ((self._send, SEND_INTERVAL_S), (self._poll_cancel, POLL_INTERVAL_S))
        code = await self._collect(server, self._wait_for_command(), work)
        waiting.cancel()
        if self._note:
            print_message(self._note)
        await self._say_farewell(connecting, self._build_exit_report(code, started))
        return code

    async def _wait_for_command(self) -> int:
        code = await asyncio.to_thread(self._command.wait)
        self._miss_ranks(has_ended=True)
        return code

    def _miss_ranks(self, *, has_ended: bool = False) -> None:
        """Report this run without the ranks that have sent nothing, and note why they may be missing."""
        if not self._has_metered:
            self._note = NOT_METERED_NOTE
        if not self._sized.is_set():
            self._set_size(1, None)
        if not self._node.done() and (self._nodes == 1 or has_ended):
            self._set_node(self._known_node or 0)

    async def _report_missing_ranks(self) -> None:
        await asyncio.sleep(self._rank_timeout_s)
        self._miss_ranks()
        await self._try_report()

    def _set_size(self, world_size: int, local_ranks: int | None) -> None:
        """Set the number of ranks that a rank reports."""
        tasks = get_slurm_tasks(os.environ)
        ranks = local_ranks or (world_size // tasks if world_size % tasks == 0 else world_size)
        self._ranks, self._nodes = min(ranks, world_size), max(1, world_size // ranks)
        self._sized.set()

    def _check_size(self, world_size: int, local_ranks: int | None) -> None:
        """Use the first reported number of ranks, and warn once if it differs from that of the run."""
        if not self._sized.is_set():
            self._set_size(world_size, local_ranks)
        elif world_size != self._nodes * self._ranks and not self._has_warned:
            self._has_warned = True
            print_message(
                f"The command started {world_size} ranks, but the run has {self._nodes * self._ranks}. "
                "Use --ranks, or a longer --rank-timeout."
            )

    def _build_environment(self, socket: Path) -> dict[str, str]:
        """Return the command's environment with the address of the telemetry socket."""
        env = get_command_environment()
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        calls_meter = any("workers.meter" in word for word in self._launch.argv)
        if calls_meter and "site-packages" not in PACKAGE_ROOT.parts and str(PACKAGE_ROOT) not in paths:
            paths.append(str(PACKAGE_ROOT))  # a checkout that is not installed
        if self._launch.log_variables:
            env.setdefault("PYTHONUNBUFFERED", "1")  # output goes through a file to the terminal
        if self._compared_group:
            env["MESHBOARD_COMPARE"] = self._compared_group
        env |= self._launch.log_variables
        return env | build_hook_variables(socket, paths) | {COOKIE_VARIABLE: f"{self._cookie}/1"}

    def _forward_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._received_signal = number
        self._command.send(number)

    async def _connect(self) -> None:
        """Register this node on the board when its number of ranks is known, unless the board rejects it."""
        await self._sized.wait()
        try:
            request = self._request.add_size(self._nodes, self._ranks)
            registration = RunRegistration(self._client, request, print_message)
            self._run = await registration.open()
            print_message(f"Run on the board: {self._run.url}" if self._run.url else f"Joining run {self._run.id}.")
            node = await asyncio.shield(self._node)
            member = await registration.join(self._run, node, self._node_name)
        except RunRefusedError as error:
            print_message(f"The board refused this run ({error}). Training continues without reports to the board.")
            return
        self.transport = HttpTransport(self._client, member, print_message)
        self.publisher = Publisher(member.run, member.attempt, self.buffer, self.transport, self._node_name, self.clock)
        await self._measure_clock()
        await self._try_report()

    def _get_ranks(self, node: int) -> range:
        return range(node * self._ranks, (node + 1) * self._ranks)

    def _set_node(self, node: int) -> None:
        ranks = self._get_ranks(node)
        self._set_ranks(ranks)
        self.tail = LogTail(self._logs, ranks, LOG_BYTES, frozenset({os.geteuid()}))
        if not get_kind_rules(self._order["spec"]).trains:
            self.log_metrics = LogMetrics(ranks)
        self._node.set_result(node)

    async def _receive(self, items: list[Item]) -> None:
        """Process checked items of a rank. The first item defines the size and the number of this node if necessary."""
        for item in items:
            if item["kind"] == "start" and "world_size" in item:
                self._check_size(item["world_size"], item.get("local_ranks"))
            if item["kind"] != "gap" and not self._node.done():
                self._set_node(item["rank"] // self._ranks if self._known_node is None else self._known_node)
            if item["kind"] == "gap" or item["rank"] not in self._get_ranks(self._node.result()):
                self.buffer.count_lost(1)
                continue
            self._has_metered, self._note = True, ""
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
        has_begun = self.summary.training or bool(self._note)
        state: Literal["running", "starting"] = "running" if has_begun else "starting"
        report = AttemptReport(job=self._run.id, attempt=self._run.attempt, state=state, slots=[])
        if self._note:
            report["note"] = self._note
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


def get_slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this Slurm step, each of which runs `meshboard-meter`. Return 1 outside a step."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return max(1, int(tasks)) if tasks.isdecimal() and environment.get("SLURM_STEP_ID", "").isdecimal() else 1


def get_command_environment() -> dict[str, str]:
    """Return the environment for the command, without secrets."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
