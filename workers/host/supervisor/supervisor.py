"""Supervise one attempt: run torchrun, collect and send its telemetry, and write its exit report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from contracts.control import (
    HOST_STOPPED_REASON,
    AttemptReport,
    ExitReport,
    HostFault,
    Outcome,
    get_local_ranks,
    get_node_index,
)
from contracts.names import SAVE_FILE
from contracts.security import DecryptionError
from contracts.telemetry.batches import Item
from contracts.telemetry.items import StartItem
from contracts.telemetry.metrics import MetricSource
from workers.disk import discard_path, format_start_failure, is_host_error, write_json
from workers.host.attempts import AttemptDir
from workers.host.isolation import get_job_user
from workers.host.job_disk import DiskWatch
from workers.host.job_limits import CHECK_INTERVAL_S, JobLimits
from workers.host.programs import get_program
from workers.host.rank_files import read_failure
from workers.host.settings import USER_PER_OWNER, HostSettings
from workers.host.supervisor.event_files import EventFiles
from workers.host.supervisor.exit_report import AttemptEnd, build_exit_report, describe_save
from workers.host.supervisor.health import GaugeSampler
from workers.host.supervisor.http_transport import BadUrlError, BoardClient
from workers.host.supervisor.log_metrics import LogMetrics
from workers.host.supervisor.log_tail import LogTail
from workers.host.supervisor.memory_kills import MemoryKillWatch
from workers.host.supervisor.multi_host import (
    GangLease,
    NotReadyError,
    coordinate_start,
    deliver_loan,
    wait_for_members,
)
from workers.host.supervisor.publisher import BoardTransport, Publisher, ReadyMember, TransportError
from workers.host.supervisor.script_upload import STOPPED, UploadError, needs_upload, prepare_upload
from workers.host.supervisor.telemetry_server import TelemetryServer
from workers.host.supervisor.telemetry_session import POLL_INTERVAL_S, TelemetrySession
from workers.host.supervisor.torchrun_process import TorchrunProcess

log = logging.getLogger(__name__)

SEND_INTERVAL_S = 0.1
EVENT_FILES_INTERVAL_S = 2.0
DISK_CHECK_INTERVAL_S = 5.0
FAREWELL_TIMEOUT_S = 30.0  # to send the rest after the attempt has ended


class Supervisor(TelemetrySession):
    """One attempt on this host. `folder` is created for the telemetry socket."""

    transport: BoardTransport
    publisher: Publisher
    tail: LogTail
    _event_files: EventFiles | None = None  # of scripts

    def __init__(self, attempt: AttemptDir, settings: HostSettings, folder: Path, transport: BoardTransport) -> None:
        self.attempt, self.order = attempt, attempt.read_order()
        ranks = get_local_ranks(self.order)
        super().__init__(ranks)
        self.settings = replace(settings, job_user=get_job_user(self.order, settings))
        self.folder, self.transport = folder, transport
        user = self.settings.job_user
        owners = frozenset({os.geteuid()} if user is None else {os.geteuid(), user.uid})
        self.tail = LogTail(attempt.logs, ranks, settings.log_bytes, owners)
        if script := self.order["spec"].get("script"):
            self.log_metrics = LogMetrics(ranks, script.get("log_pattern"))
            if get_node_index(self.order) == 0:  # hosts may share the folder
                folders = (attempt.work, *get_program(self.order).folders(self.settings, self.order).shared)
                self._event_files = EventFiles(folders, ranks[0], owners)
        self.publisher = Publisher(attempt.job, attempt.attempt, self.buffer, transport, settings.name, self.clock)
        self.lease = GangLease(self.order)
        self._disk_watch = DiskWatch(attempt, self.order, settings)
        self._limits = JobLimits(attempt, self.settings, has_own_user=settings.job_user == USER_PER_OWNER)
        self.reason = ""
        self.preempted = self._save_requested = False
        self._called: set[MetricSource] = set()  # libraries whose calls the meter reads
        self._exit: ExitReport | None = None
        self._host_fault: HostFault | None = None
        self._started = self._running = False

    async def run(self) -> Outcome:
        """Run the attempt, report its end to the board, and return its outcome."""
        started = self._claimed = time.time()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._handle_term)
        memory_kills: MemoryKillWatch | None = MemoryKillWatch()
        try:
            code = await self._train()
            if code != 0 and self.ended_by is None and (excess := self._limits.find_excess(None)):
                self.ended_by, self.reason = "failed", excess
                memory_kills = None  # the reason names the limit at which the kernel ended the process
        finally:
            self._limits.remove()
            discard_path(self.folder)
        planned_steps = int(self.order["spec"].get("train", {}).get("steps", 0))  # 0 for other kinds of jobs
        stopped_early = self.summary.stopped_early(planned_steps)
        if code == 0 and self._save_requested and self.ended_by is None and stopped_early:
            await self._set_save_outcome()
        failure = read_failure(self.attempt, get_local_ranks(self.order))
        end = AttemptEnd(
            code,
            failure,
            self.ended_by,
            self.reason,
            started,
            self.clock.offset_s,
            self.preempted,
            memory_kills,
            self._host_fault,
            self._limits,
        )
        self._exit = build_exit_report(self.attempt, self.order, end, self.summary, self.tail)
        try:
            write_json(self.attempt.exit_file, self._exit)
        except OSError:  # a full disk: the controller still gets the report
            log.exception("cannot write the exit report")
        await self._send_rest()
        return self._exit["outcome"]

    async def _train(self) -> int:
        """Run all processes, and return torchrun's exit code."""
        server = await self._start()
        if server is None:
            return 1
        self._started = True
        if self.ended_by is not None:
            self._stop()
        spawned = time.time()
        await self._measure_clock()  # before the first item is recorded
        self._record(StartItem(kind="start", rank=-1, time=self._claimed, stage="claimed"))
        self._record(StartItem(kind="start", rank=-1, time=spawned, stage="spawned"))
        slots = dict(zip(get_local_ranks(self.order), self.order["slots"], strict=False))
        GaugeSampler(slots, with_gpus=self.settings.device == "cuda").start(self._record_gauges)
        work = (
            (self.publisher.send, SEND_INTERVAL_S),
            (self._poll_flags, POLL_INTERVAL_S),
            (self._poll_requested_steps, POLL_INTERVAL_S),
            (self.monitor.check_stopped, 0.0),
            (self._read_event_files, EVENT_FILES_INTERVAL_S),
            (self._check_limits, CHECK_INTERVAL_S),
            *([(self._check_disk_use, DISK_CHECK_INTERVAL_S)] if self._disk_watch.limit_bytes else []),
        )
        others = []
        if "gang" in self.order:
            others.append(asyncio.create_task(self._start_gang()))
        if "checkpoint" in self.order and "lent" in self.order["checkpoint"]:
            loan = deliver_loan(self.transport, self.order["checkpoint"], self.folder, self.settings.job_user)
            others.append(asyncio.create_task(loan))
        code = await self._collect(server, self.torchrun.wait(), work, others)
        await asyncio.to_thread(discard_path, self.attempt.environment)
        await self._read_event_files(final=True)
        return code

    async def _start(self) -> asyncio.Server | None:
        """Start the telemetry server and torchrun. On an error, set the outcome and return None."""
        user, name = self.settings.job_user, self.settings.name
        address = self.folder / "telemetry"
        telemetry = TelemetryServer(self.order, self._receive, self.buffer.count_lost, self.monitor.record_contact)
        try:
            self.folder.mkdir(mode=0o700)
            self.folder.chmod(0o700 if user is None else 0o711)
            server = await telemetry.start(address, None if user is None else user.uid)
        except OSError as error:
            self._host_fault = "launch"
            self._end("failed", format_start_failure(name, error, self.folder))
            return None
        try:
            if needs_upload(self.order):
                await self._prepare_upload(self._open_board_client())
            self.torchrun = TorchrunProcess(self.attempt, self.order, self.settings, str(address), self._limits)
            await self.torchrun.start()
        except (UploadError, BadUrlError) as error:
            self._end("failed", f"not started on {name}: {error}")
        except DecryptionError as error:
            self._end("failed", f"not started: cannot decrypt the variables of the project: {error}")
        except OSError as error:
            if is_host_error(error):
                self._host_fault = "launch"
            self._end("failed", format_start_failure(name, error, self.attempt.job_dir))
        else:
            return server
        server.close()
        return None

    async def _prepare_upload(self, client: BoardClient) -> None:
        """Prepare the upload, and stop when the attempt is ended. Raises UploadError, OSError."""
        preparing = asyncio.create_task(prepare_upload(self.attempt, self.order, self.settings, client))
        while not preparing.done():
            await self._poll_flags()
            if self.ended_by is not None:
                client.stop()
            await asyncio.wait({preparing}, timeout=POLL_INTERVAL_S)
        await preparing
        if self.ended_by is not None:
            raise UploadError(STOPPED)

    def _open_board_client(self) -> BoardClient:
        """Return a client of the board for downloads. Raises BadUrlError, OSError."""
        if not self.settings.board_url:
            raise BadUrlError("The host does not know the board. Start it with python -m workers.host.join URL.")
        # The operator of the host allowed http:// when the host joined.
        return BoardClient(self.settings.board_url, allows_http=True)

    async def _start_gang(self) -> None:
        """Start the ranks of a multi-host job when all hosts are ready."""

        async def get_leader(own: ReadyMember) -> ReadyMember:
            return await wait_for_members(self.transport, self.order, own)

        launcher, gang, address = self.torchrun.launcher, self.order["gang"], self.settings.address
        try:
            await coordinate_start(launcher, gang, address, get_leader, lambda: self.summary.training)
        except NotReadyError as error:
            self._host_fault = "gang"
            self._end("failed", f"the gang did not start: {error}")

    def _handle_term(self) -> None:
        self._end("failed", HOST_STOPPED_REASON)

    def _request_save(self) -> None:
        """Ask the ranks to save a checkpoint and stop. They check for the file between steps.

        The board ends a run that does not save in time.
        """
        (self.folder / SAVE_FILE).touch()
        self._save_requested = True

    async def _set_save_outcome(self) -> None:
        """Set the outcome of a run that saved a checkpoint and stopped on request.

        In a gang only the first member does this, because its rank 0 writes the checkpoint, possibly after the other
        members have ended.
        """
        if get_node_index(self.order) == 0:
            self.ended_by = "cancelled"
            self.reason = describe_save(self.summary, "to make room for a job with higher priority")

    def _end(self, outcome: Outcome, reason: str, *, at_once: bool = False) -> None:
        if self.ended_by is None:
            self.ended_by, self.reason = outcome, reason
            if at_once:
                self.torchrun.kill()
            elif self._started:
                self._stop()

    def _stop(self) -> None:
        self._stopping = asyncio.create_task(self.torchrun.stop())

    async def _receive(self, items: Iterable[Item]) -> None:
        """Process checked items of a rank."""
        has_checkpoint = False
        for item in items:
            has_checkpoint = has_checkpoint or item["kind"] == "checkpoint"
            if item["kind"] == "metric":
                self._called.add(item["source"])
            self._receive_item(item)
        if self.summary.training and not self._running:
            self._running = True
            try:
                self.attempt.running_marker.touch()
            except OSError:  # a full disk: the controller still gets the state
                log.exception("cannot store that training started")
            await self._try_report()
        elif has_checkpoint:  # a later attempt resumes from it
            await self._try_report()

    async def _report(self) -> None:
        """Send the state from memory, because the job could have changed the files."""
        state: Literal["exited", "running", "starting"] = "running" if self._running else "starting"
        job, attempt, slots = self.attempt.job, self.attempt.attempt, self.order["slots"]
        report = AttemptReport(job=job, attempt=attempt, state=state, slots=slots)
        if checkpoint := self.summary.newest_checkpoint:
            report["checkpoint"] = checkpoint
        if self._exit is not None:
            report["state"], report["exit"] = "exited", self._exit
        elif note := self.attempt.read_note():
            report["note"] = note
        await self.transport.send_report(report)

    async def _poll_flags(self) -> None:
        with contextlib.suppress(TransportError):
            if await self.transport.is_cancelled():
                self._end("cancelled", "cancelled on request")
            elif not self._save_requested and await self.transport.is_save_requested():
                self._request_save()
            self.lease.renew()
        if self.lease.is_expired():
            self._end("lost", self.lease.describe())

    async def _read_event_files(self, *, final: bool = False) -> None:
        """Add metrics of files, unless the meter reads the calls that write these files."""
        if self._event_files is not None:
            read = self._event_files.read
            self._record_metrics(await asyncio.to_thread(read, frozenset(self._called), final=final))

    async def _check_limits(self) -> None:
        if excess := await asyncio.to_thread(self._limits.find_excess, self.torchrun.process.pid):
            self._end("failed", excess, at_once=True)

    async def _check_disk_use(self) -> None:
        try:
            if excess := await asyncio.to_thread(self._disk_watch.find_excess):
                self._end("failed", excess)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("cannot measure the disk use of the job: %s", error)

    async def _poll_requested_steps(self) -> None:
        with contextlib.suppress(TransportError):
            self.timelines.request(await self.transport.get_requested_steps())

    async def _send_rest(self) -> None:
        """Send the remaining telemetry and the exit report. Otherwise the host worker sends the exit report later."""
        deadline, late = time.monotonic() + FAREWELL_TIMEOUT_S, False
        while not await self._try_send_rest(late=late) and not late:
            await asyncio.sleep(POLL_INTERVAL_S)
            late = time.monotonic() >= deadline
        await self.transport.close()

    async def _try_send_rest(self, *, late: bool) -> bool:
        if not await self.publisher.send_last(late=late):
            return False
        try:
            await self.transport.renew_stream()
            await self._report()
        except TransportError:
            return False
        return True
