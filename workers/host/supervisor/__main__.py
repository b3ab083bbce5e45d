"""`python -m workers.host.supervisor RUN_DIR JOB ATTEMPT`: one attempt from start to exit report, without torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from contracts.codec import BadMessageError, validate_item
from contracts.control import HOST_STOPPED_REASON, AttemptReport, ExitReport, Outcome, get_local_ranks, get_node_index
from contracts.names import SAVE_FILE
from contracts.security import DecryptionError
from contracts.telemetry.batches import Item
from contracts.telemetry.health import GaugeItem
from contracts.telemetry.steps import StartItem
from workers.disk import format_start_failure
from workers.host.apart.identity import user_of
from workers.host.attempts import SOCKET_FOLDER, AttemptDir, attempt_dir, report_of_host, socket_root
from workers.host.files import write_json
from workers.host.processes import process_id
from workers.host.settings import HostSettings, host_settings
from workers.host.supervisor.board import Board
from workers.host.supervisor.clock import BoardClock
from workers.host.supervisor.ending import Ended, exit_report, read_failure, saved_words, steps_of
from workers.host.supervisor.follow import follow
from workers.host.supervisor.gang import NotReadyError, gathered, meet
from workers.host.supervisor.gauges import HostGauge, slots_of
from workers.host.supervisor.lease import Lease
from workers.host.supervisor.line import GangLine, LineError, Ready
from workers.host.supervisor.line.over_redis import RedisLine
from workers.host.supervisor.loan import hand_over
from workers.host.supervisor.publish import Publisher
from workers.host.supervisor.ranks import Ranks
from workers.host.supervisor.serve import Telemetry
from workers.host.supervisor.tail import LogTail
from workers.host.supervisor.tally import Tally
from workers.host.supervisor.tasks import cancelled, steadily
from workers.host.supervisor.timelines import Timelines
from workers.host.supervisor.training import Training

log = logging.getLogger(__name__)

BATCH_S = 0.1
POLL_S = 1.0
HEARTBEAT_S = 5.0
CLOCK_S = 30.0
FAREWELL_S = 30.0
LAST_LINES_S = 10.0


class Supervisor:
    """State of one attempt while it runs."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings, folder: Path, line: GangLine) -> None:
        self.attempt, self.order = attempt, attempt.read_order()
        self.settings = replace(settings, job_user=user_of(self.order, settings))
        self.folder = folder  # of the telemetry's socket
        user = self.settings.job_user
        owners = frozenset({os.geteuid()} if user is None else {os.geteuid(), user.uid})
        self.tail = LogTail(attempt.logs, get_local_ranks(self.order), settings.log_bytes, owners)
        self.board, self.tally, self.clock = Board(), Tally(get_local_ranks(self.order)[0]), BoardClock()
        self.timelines = Timelines(get_local_ranks(self.order), self.board.add_step)
        self.ranks = Ranks(self._tell)
        self.line = line
        self.publisher = Publisher(attempt.job, attempt.attempt, self.board, self.line, settings.name, self.clock)
        self.lease = Lease(self.order)
        self.ended_by: Outcome | None = None  # set when we, not the training, ended it
        self.reason = ""
        self.preempted = self._save_first = False
        self._exit: ExitReport | None = None
        self._started = self._running = False
        self._over = asyncio.Event()

    async def run(self) -> Outcome:
        """How it ended, when the board was told."""
        started = self._claimed = time.time()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._shut_down)
        try:
            code = await self._train()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        if code == 0 and self._save_first and self.ended_by is None and self.tally.stopped_early(steps_of(self.order)):
            await self._tell_of_stop()
        failure = read_failure(self.attempt, get_local_ranks(self.order))
        ended = Ended(code, failure, self.ended_by, self.reason, started, self.clock.offset_s, self.preempted)
        self._exit = exit_report(self.attempt, self.order, ended, self.tally, self.tail)
        try:
            write_json(self.attempt.exit, self._exit)
        except OSError:  # a full disk: the controller hears of it all the same
            log.exception("cannot write the exit report")
        await self._say_goodbye()
        return self._exit["outcome"]

    async def _train(self) -> int:
        """From the first process to the last; torchrun's exit code."""
        user = self.settings.job_user
        address = self.folder / "telemetry"
        telemetry = Telemetry(self.order, self._take, self.board.lose, self.ranks.heard)
        try:
            self.folder.mkdir(mode=0o700)
            self.folder.chmod(0o700 if user is None else 0o711)
            server = await telemetry.start(address, None if user is None else user.uid)
        except OSError as error:
            self._end("failed", format_start_failure(self.settings.name, error, self.folder))
            return 1
        try:
            self.training = Training(self.attempt, self.order, self.settings, str(address))
        except DecryptionError as error:
            server.close()
            self._end("failed", f"not started: cannot decrypt the variables of the project: {error}")
            return 1
        try:
            await self.training.start()
        except OSError as error:
            server.close()
            self._end("failed", format_start_failure(self.settings.name, error, self.attempt.given))
            return 1
        self._started = True
        if self.ended_by is not None:
            self._stop()
        tail = asyncio.create_task(follow(lambda: self.tail, self._tell, self._over))
        spawned = time.time()
        await self._set_clock()  # before anything is told
        self._tell(StartItem(kind="start", rank=-1, time=self._claimed, stage="claimed"))
        self._tell(StartItem(kind="start", rank=-1, time=spawned, stage="spawned"))
        slots = slots_of(get_local_ranks(self.order), self.order["slots"])
        HostGauge(slots, with_gpus=self.settings.device == "cuda").start(self._tell_all)
        regular = (
            (self.publisher.send, BATCH_S),
            (self._report_if_heard, HEARTBEAT_S),
            (self._see_cancel, POLL_S),
            (self._see_wanted, POLL_S),
            (self.ranks.look, POLL_S),
            (self.ranks.glance, 0.0),
            (self._set_clock, CLOCK_S),
        )
        others = [asyncio.create_task(steadily(work, pause_s)) for work, pause_s in regular]
        if "gang" in self.order:
            others.append(asyncio.create_task(self._meet()))
        if "checkpoint" in self.order and "lent" in self.order["checkpoint"]:
            others.append(asyncio.create_task(hand_over(self.line, self.order["checkpoint"], self.folder, user)))
        code = await self.training.wait()
        self._over.set()
        # A disk that hangs must not keep the slots: then the last lines are missing.
        await asyncio.wait([tail], timeout=LAST_LINES_S)
        await cancelled([*others, tail])
        server.close()
        self.timelines.finish()
        return code

    async def _meet(self) -> None:
        """Of a gang: its ranks start when all members are ready, or not at all."""

        async def lead_of(own: Ready) -> Ready:
            return await gathered(self.line, self.order, own)

        try:
            launcher, gang = self.training.launcher, self.order["gang"]
            await meet(launcher, gang, self.settings.address, lead_of, lambda: self.tally.training)
        except NotReadyError as error:
            self._end("failed", f"the gang did not start: {error}")

    async def _set_clock(self) -> None:
        with contextlib.suppress(LineError):
            await self.clock.measure(self.line.now)

    def _shut_down(self) -> None:
        self._end("failed", HOST_STOPPED_REASON)

    def _ask_to_save(self) -> None:
        """Its ranks look for the file between steps; whoever saves nothing is ended when the board's patience is."""
        (self.folder / SAVE_FILE).touch()
        self._save_first = True

    async def _tell_of_stop(self) -> None:
        """Name the end of a run that saved and stopped because it was asked to.

        The first member of a gang alone does: its rank 0 wrote the checkpoint, and may still when the others are done.
        """
        if get_node_index(self.order) == 0:
            self.ended_by, self.reason = (
                "cancelled",
                saved_words(self.tally, "to make room for a job with higher priority"),
            )

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.ended_by is None:
            self.ended_by, self.reason = outcome, reason
            if self._started:
                self._stop()

    def _stop(self) -> None:
        self._stopping = asyncio.create_task(self.training.stop())

    async def _take(self, items: list[Item]) -> None:
        for item in items:
            if item["kind"] == "timeline":
                item["time"] += self.clock.offset_s
                self.timelines.add(item)
                continue
            self.ranks.take(item)
            self._add(item)
        if self.tally.training and not self._running:
            self._running = True
            try:
                self.attempt.running.touch()
            except OSError:  # a full disk: the controller hears of it all the same
                log.exception("cannot store that training started")
            await self._report_if_heard()
        elif any(item["kind"] == "checkpoint" for item in items):  # what a later attempt must go on from
            await self._report_if_heard()

    def _add(self, item: Item) -> None:
        """Take an item whose time is this host's."""
        item["time"] += self.clock.offset_s
        self.tally.add(item)
        self.board.add(item)

    def _tell(self, item: Item) -> None:
        """Take an item of our own: a board refuses whole batches for what one of their items breaks."""
        try:
            self._add(validate_item(item))
        except BadMessageError as error:
            log.warning("dropped a %s item of the supervisor: %s", item["kind"], error)
            self.board.lose(1)

    def _tell_all(self, items: list[GaugeItem]) -> None:
        for item in items:
            self._tell(item)

    async def _report(self) -> None:
        """Told from memory: whatever the job did to our files, its state is told."""
        state: Literal["exited", "running", "starting"] = "running" if self._running else "starting"
        report = AttemptReport(
            job=self.attempt.job, attempt=self.attempt.attempt, state=state, slots=self.order["slots"]
        )
        if checkpoint := self.tally.checkpoint:
            report["checkpoint"] = checkpoint
        if self._exit is not None:
            report["state"], report["exit"] = "exited", self._exit
        elif note := self.attempt.read_note():
            report["note"] = note
        await self.line.report(report)

    async def _report_if_heard(self) -> None:
        with contextlib.suppress(LineError):  # the next one tells as much
            await self._report()

    async def _see_cancel(self) -> None:
        with contextlib.suppress(LineError):
            if await self.line.cancelled():
                self._end("cancelled", "cancelled on request")
            elif not self._save_first and await self.line.asked_to_save():
                self._ask_to_save()
            self.lease.renew()
        if self.lease.over():
            self._end("lost", self.lease.words())

    async def _see_wanted(self) -> None:
        with contextlib.suppress(LineError):
            self.timelines.want(await self.line.wanted())

    async def _say_goodbye(self) -> None:
        """Deliver the rest and the exit. If the board stays away the host worker repeats the exit report."""
        deadline, late = time.monotonic() + FAREWELL_S, False
        while not await self._said_all(late=late) and not late:
            await asyncio.sleep(POLL_S)
            late = time.monotonic() >= deadline
        await self.line.close()

    async def _said_all(self, *, late: bool) -> bool:
        if not await self.publisher.send_last(late=late):
            return False
        try:
            await self.line.renew()
            await self._report()
        except LineError:
            return False
        return True


def main() -> int:
    attempt = attempt_dir(Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]))
    identity = process_id(os.getpid())
    assert identity is not None
    try:
        # Named before it is there, so that whoever buries us finds it.
        folder = socket_root() / f"{SOCKET_FOLDER}{secrets.token_hex(6)}"
        write_json(attempt.supervisor, {**identity._asdict(), "folder": str(folder)})
    except OSError as error:
        asyncio.run(_tell_of(attempt, host_settings(), error))
        return 1
    if attempt.exit.exists():  # so late that the host worker has reported this attempt lost: it must not run after all
        return 1
    asyncio.run(_supervise(attempt, host_settings(), folder))
    return 0


async def _tell_of(attempt: AttemptDir, settings: HostSettings, error: OSError) -> None:
    """An attempt that cannot begin, from memory: the host worker would only find that its supervisor is not there."""
    order = attempt.read_order()
    exit_told = report_of_host(attempt, "failed", format_start_failure(settings.name, error, attempt.own))
    line = RedisLine(attempt, settings, get_node_index(order))
    report = AttemptReport(
        job=attempt.job, attempt=attempt.attempt, state="exited", slots=order["slots"], exit=exit_told
    )
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline:
        with contextlib.suppress(LineError):
            await line.report(report)
            break
        await asyncio.sleep(POLL_S)
    await line.close()


async def _supervise(attempt: AttemptDir, settings: HostSettings, folder: Path) -> None:
    line = RedisLine(attempt, settings, get_node_index(attempt.read_order()))
    await Supervisor(attempt, settings, folder, line).run()


if __name__ == "__main__":
    sys.exit(main())
