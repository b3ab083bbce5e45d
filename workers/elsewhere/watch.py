"""One node of a run that was launched here by hand: its command, what its ranks say, and the board that hears it.

The parts are the supervisor's own. The command waits for the board at no point: what the board does not hear is kept in
bounded bytes, and the command's exit code is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from contracts.control import VERSION, AttemptReport, ExitReport, LaunchOrder, Outcome
from contracts.telemetry.batches import Item
from contracts.telemetry.health import GaugeItem
from contracts.telemetry.steps import StartItem
from workers.elsewhere.command import Launch
from workers.elsewhere.ending import first_failure, how_it_ended
from workers.elsewhere.joining import Joining, RefusedError, Run
from workers.elsewhere.terminal import Command, on_signals, say
from workers.elsewhere.tries import Tries
from workers.host.apart.sandbox import PACKAGES
from workers.host.attempts import AttemptDir
from workers.host.processes import COOKIE, sweep
from workers.host.supervisor.board import Board as Waiting
from workers.host.supervisor.clock import BoardClock
from workers.host.supervisor.ending import Ended, exit_report
from workers.host.supervisor.follow import follow
from workers.host.supervisor.gauges import HostGauge
from workers.host.supervisor.line import LineError
from workers.host.supervisor.line.https import Board
from workers.host.supervisor.line.over_http import HttpLine
from workers.host.supervisor.publish import Publisher
from workers.host.supervisor.ranks import Ranks
from workers.host.supervisor.serve import Telemetry
from workers.host.supervisor.tail import LogTail
from workers.host.supervisor.tally import Tally
from workers.host.supervisor.tasks import cancelled, steadily
from workers.host.supervisor.timelines import Timelines

BATCH_S = 0.5  # a request of its own each
HEARTBEAT_S = 5.0
SEE_CANCEL_S = 1.0
CLOCK_S = 30.0
LOOK_S = 1.0  # at the ranks' processes
TERM_GRACE_S = 10.0
FAREWELL_S = 30.0
QUIET_S = 2.0  # of these before the user is told what is waited for
AGAIN_S = 0.5
LAST_LINES_S = 10.0
LOG_BYTES = 64 * 2**20  # of each file of a rank's words, while it runs
LOCAL = "local"  # what the meter calls the run on its socket: it has no other name before the board answers
HIDDEN = ("MESHBOARD_TOKEN", "MESHBOARD_RUN")  # from the command


class Place(NamedTuple):
    """This node of the run, by the name it has on the board."""

    node: int | None  # None: its ranks will tell
    name: str


class Told(NamedTuple):
    """What the board is told of the run. `kind`: of job. `compared`: what its prediction calls a group of all ranks,
    empty where there is none."""

    kind: str
    compared: str


class NotMeteredError(Exception):
    """Nothing can be watched here; says why. Nothing is started."""


class Watch:
    """From the command's start to its end."""

    def __init__(self, launch: Launch, place: Place, board: Board, joining: Joining, folder: Path, told: Told) -> None:
        self._launch, self._place, self._board, self._joining = launch, place, board, joining
        self._folder, self._logs = folder, folder / "logs"
        self._order = LaunchOrder(
            v=VERSION,
            job=LOCAL,
            attempt=1,
            spec={"kind": told.kind},
            slots=list(range(launch.nodes * launch.ranks)),
            expires=0.0,
        )
        self._waiting, self._tally, self._clock = Waiting(), Tally(), BoardClock()
        self._timelines = Timelines((), self._waiting.add_step)
        self._ranks = Ranks(self._add)
        self._tries = Tries()
        self._node: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._tail: LogTail | None = None
        self._line: HttpLine | None = None
        self._publisher: Publisher | None = None
        self._run: Run | None = None
        self._over = asyncio.Event()
        self._signalled: int | None = None
        self._ended_by: Outcome | None = None
        self._compared = told.compared
        self._cookie = f"meter-{secrets.token_hex(6)}"

    async def run(self) -> int:
        """The command's exit code, -N of signal N.

        Raises:
            NotMeteredError: our own files or our socket cannot be made.
            OSError: the command cannot be started.
        """
        started, log = time.time(), self._logs / "launcher.log"
        socket = self._folder / "telemetry"
        telemetry = Telemetry(self._order, self._take, self._waiting.lose, self._ranks.heard)
        try:
            self._logs.mkdir()
            log.touch(0o600)
            server = await telemetry.start(socket, None)
        except OSError as error:
            raise NotMeteredError(str(error)) from None
        HostGauge({}, with_gpus=False).start(self._add_all)
        self._command = Command(self._launch.argv, self._environment(socket), log, apart=self._launch.apart)
        self._add(StartItem(kind="start", rank=-1, time=time.time(), stage="spawned"))
        on_signals(self._pass_on)
        if self._place.node is not None:
            self._is_node(self._place.node)
        connecting = asyncio.create_task(self._connect())
        tail = asyncio.create_task(follow(lambda: self._tail, self._add, self._over))
        regular = (
            (self._send, BATCH_S),
            (self._report, HEARTBEAT_S),
            (self._see_cancel, SEE_CANCEL_S),
            (self._set_clock, CLOCK_S),
            (self._ranks.look, LOOK_S),
        )
        others = [asyncio.create_task(steadily(work, pause_s)) for work, pause_s in regular]
        code = await asyncio.to_thread(self._command.wait)
        self._over.set()
        if not self._node.done():
            self._is_node(0)  # no rank ever spoke
        await asyncio.wait([tail], timeout=LAST_LINES_S)
        await cancelled([*others, tail])
        server.close()
        self._timelines.finish()
        await self._say_goodbye(connecting, self._ending(code, started))
        return code

    def _environment(self, socket: Path) -> dict[str, str]:
        """Ours, without the board's secrets, and with the way to us."""
        environment = without_secrets()
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        if "site-packages" not in PACKAGES.parts and str(PACKAGES) not in paths:
            paths.append(str(PACKAGES))  # a checkout that was not installed
        if paths:
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        if self._launch.apart:
            environment.setdefault("PYTHONUNBUFFERED", "1")  # a rank's words go through a file to the terminal
        if self._compared:
            environment["MESHBOARD_COMPARE"] = self._compared
        return {**environment, "MESHBOARD_TELEMETRY": str(socket), COOKIE: f"{self._cookie}/1"}

    def _pass_on(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self._signalled = number
        self._command.send(number)

    async def _connect(self) -> None:
        """Until the board knows this node, or will not."""
        try:
            self._run = await self._joining.open()
            say(f"Run on the board: {self._run.url}" if self._run.url else f"Joining run {self._run.id}.")
            node = await asyncio.shield(self._node)
            who = await self._joining.join(self._run, node, self._place.name)
        except RefusedError as error:
            say(f"The board refused this run ({error}). Training continues without reports to the board.")
            return
        self._line = HttpLine(self._board, who, say)
        self._publisher = Publisher(who.run, who.attempt, self._waiting, self._line, self._place.name, self._clock)
        await self._set_clock()
        await self._report()

    def _is_node(self, node: int) -> None:
        first = node * self._launch.ranks
        self._tally = Tally(first)
        self._timelines = Timelines(range(first, first + self._launch.ranks), self._waiting.add_step)
        self._tail = LogTail(self._logs, range(first, first + self._launch.ranks), LOG_BYTES, frozenset({os.geteuid()}))
        self._node.set_result(node)

    def _is_ours(self, rank: int) -> bool:
        if not self._node.done():
            self._is_node(rank // self._launch.ranks)
        return rank // self._launch.ranks == self._node.result()

    async def _take(self, items: list[Item]) -> None:
        """From a rank. The first of them tells which node this is, where nobody knew."""
        for item in items:
            if item["kind"] == "gap" or not self._is_ours(item["rank"]):
                self._waiting.lose(1)
                continue
            if item["kind"] == "timeline":
                item["time"] += self._clock.offset_s
                self._timelines.add(item)
                continue
            self._tries.carry(item)
            self._ranks.take(item)
            began = not self._tally.training
            self._add(item)
            if began and self._tally.training:
                await self._report()

    def _add(self, item: Item) -> None:
        """Take an item whose time is ours."""
        item["time"] += self._clock.offset_s
        self._tally.add(item)
        self._waiting.add(item)

    def _add_all(self, items: list[GaugeItem]) -> None:
        for item in items:
            self._add(item)

    async def _set_clock(self) -> None:
        if self._line is not None:
            with contextlib.suppress(LineError):
                await self._clock.measure(self._line.now)

    async def _send(self) -> None:
        if self._publisher is not None:
            await self._publisher.send()

    async def _report(self) -> None:
        with contextlib.suppress(LineError):
            await self._tell_state()

    async def _tell_state(self) -> None:
        """Raises LineError."""
        if self._line is None or self._run is None:
            return
        begun = self._tally.training or not self._launch.metered
        state: Literal["running", "starting"] = "running" if begun else "starting"
        await self._line.report(AttemptReport(job=self._run.id, attempt=self._run.attempt, state=state, slots=[]))

    async def _see_cancel(self) -> None:
        if self._line is None or self._ended_by is not None:
            return
        with contextlib.suppress(LineError):
            if await self._line.cancelled():
                say("Cancelled on the board. Stopping the command.")
                self._ended_by = "cancelled"
                self._stopping = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        """TERM, and after TERM_GRACE_S KILL, for everything that the command started."""
        self._command.send(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TERM_GRACE_S):
                await self._over.wait()
            return
        await asyncio.to_thread(sweep, self._cookie, 1)

    def _ending(self, code: int, started: float) -> ExitReport:
        tail = self._tail
        assert tail is not None, "the node was decided"
        ended_by, reason = self._ended_by, "cancelled on request"
        if ended_by is None and self._signalled is not None and code != 0:
            ended_by, reason = (
                "cancelled",
                f"ended by {signal.Signals(self._signalled).name} on the machine that launched it",
            )
        first = self._node.result() * self._launch.ranks
        ranks = range(first, first + self._launch.ranks)
        failure = None if ended_by else first_failure(self._command.failure, self._logs, ranks)
        if ended_by is None and failure is None and code != 0:
            program = PurePath(self._launch.argv[0]).name
            ended_by, reason = "failed", how_it_ended(program, code, self._tally.steps)
        ended = Ended(code, failure, ended_by, reason, started, self._clock.offset_s)
        return exit_report(AttemptDir(self._folder, LOCAL, 1), self._order, ended, self._tally, tail)

    async def _say_goodbye(self, connecting: asyncio.Task[None], told: ExitReport) -> None:
        """Tell the rest and the end. A signal now means: do not wait for the board."""
        loop = asyncio.get_running_loop()
        enough = asyncio.Event()
        on_signals(lambda _number: _set(loop, enough))
        saying = asyncio.create_task(self._say_all(connecting, told))
        stop = asyncio.create_task(_wait(enough))
        await asyncio.wait([saying, stop], timeout=QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        if not saying.done() and not stop.done():
            say(f"Reporting the end of the run to the board, for at most {FAREWELL_S:.0f} s. Ctrl-C stops the wait.")
            await asyncio.wait([saying, stop], timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        if not saying.done():
            say("The board did not receive the end of the run.")
        await cancelled([task for task in (saying, stop, connecting) if not task.done()])

    async def _say_all(self, connecting: asyncio.Task[None], told: ExitReport) -> None:
        """First what waits: with the exit the run is over for the board."""
        await asyncio.wait([connecting])
        if self._line is None or self._publisher is None or self._run is None:
            return  # it was refused
        told["job"], told["attempt"] = self._run.id, self._run.attempt
        report = AttemptReport(job=self._run.id, attempt=self._run.attempt, state="exited", slots=[], exit=told)
        deadline = time.monotonic() + FAREWELL_S
        while not self._line.over:
            with contextlib.suppress(LineError):
                if await self._publisher.send_last(late=time.monotonic() >= deadline):
                    await self._line.renew()
                    await self._line.report(report)
                    break
            await asyncio.sleep(AGAIN_S)
        await self._line.close()


def without_secrets() -> dict[str, str]:
    """Our environment, as the command may have it."""
    return {name: value for name, value in os.environ.items() if name not in HIDDEN}


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
