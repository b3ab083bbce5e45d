"""`python -m workers.host.supervisor ATTEMPT_DIR`: runs one attempt from start to exit report. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
import redis.asyncio
from redis.exceptions import RedisError

from contracts.control import VERSION, AttemptEvent, ExitReport, LaunchOrder, Outcome
from contracts.names import EVENTS_STREAM, TELEMETRY_MAXLEN, cancel_key, telemetry_stream
from contracts.telemetry import VERSION as TELEMETRY_VERSION
from contracts.telemetry import Frame
from workers.host.attempts import AttemptDir, process_id, read_json, write_json
from workers.host.programs import program_of
from workers.host.settings import HostSettings, host_settings
from workers.host.supervisor.board import Board
from workers.host.supervisor.tail import LAUNCHER, LogTail
from workers.host.supervisor.training import Training

BATCH_S = 0.15
TAIL_S = 0.25
POLL_S = 1.0
CANCEL_S = 0.2
HEARTBEAT_S = 5.0
FAREWELL_S = 30.0
MAX_FRAME_BYTES = 8 * 2**20


async def cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    """End tasks. Again and again: a Redis call that times out as it is cancelled tells of the timeout alone."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_S)


class Supervisor:
    """State of one attempt while it runs."""

    def __init__(self, attempt: AttemptDir, settings: HostSettings) -> None:
        self.attempt, self.settings = attempt, settings
        self.order: LaunchOrder = read_json(attempt.order)
        self.board = Board(attempt.job, attempt.attempt)
        self.tail = LogTail(attempt.logs)
        self.redis = redis.asyncio.Redis.from_url(
            settings.redis_url, socket_timeout=5, socket_connect_timeout=2, health_check_interval=10
        )
        self.ended_by: Outcome | None = None  # set when we, not the training, ended it
        self.reason = ""
        self._started = False

    async def run(self) -> None:
        started = time.time()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._shut_down)
        folder = Path(tempfile.mkdtemp(prefix="meshboard-"))  # short: a unix socket's path has at most 107 bytes
        try:
            server = await asyncio.start_unix_server(self._serve, folder / "telemetry", limit=MAX_FRAME_BYTES)
            self.training = Training(self.attempt, self.order, self.settings, str(folder / "telemetry"))
            await self.training.start()
            self._started = True
            if self.ended_by is not None:
                self._stop()
            tasks = [
                asyncio.create_task(work)
                for work in (self._publish_forever(), self._tail_forever(), self._beat(), self._watch_cancel())
            ]
            code = await self.training.wait()
            await cancelled(tasks)
            server.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._collect_logs(final=True)
        write_json(self.attempt.exit, self._exit_report(code, started))
        await self._say_goodbye()

    def _shut_down(self) -> None:
        self._end("failed", "the host was stopped")

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.ended_by is None:
            self.ended_by, self.reason = outcome, reason
            if self._started:
                self._stop()

    def _stop(self) -> None:
        self._stopping = asyncio.create_task(self.training.stop())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Frames of one rank. Whoever speaks for another job, attempt or rank is cut off."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                if size > MAX_FRAME_BYTES:
                    break
                frame = self._checked(await reader.readexactly(size))
                if frame is None:
                    break
                for item in frame["items"]:
                    self.board.add(item)
                if self.board.training and not self.attempt.running.exists():
                    self.attempt.running.touch()
                    await self._report()
        writer.close()

    def _checked(self, body: bytes) -> Frame | None:
        try:
            frame: Any = msgpack.unpackb(body)
            own = (TELEMETRY_VERSION, self.attempt.job, self.attempt.attempt)
            if (frame["v"], frame["job"], frame["attempt"]) != own or not 0 <= frame["rank"] < len(self.order["slots"]):
                return None
            # A dry run speaks for ranks that are not there.
            told = {frame["rank"], *self.order["spec"].get("dry_ranks", [])}
            if any(item["rank"] not in told for item in frame["items"]):
                return None
        except (ValueError, KeyError, TypeError, msgpack.UnpackException):
            return None
        checked: Frame = frame
        return checked

    async def _publish_forever(self) -> None:
        while True:
            await asyncio.sleep(BATCH_S)
            await self._publish()

    async def _publish(self) -> bool:
        batch = self.board.take()
        if batch is None:
            return True
        stream = telemetry_stream(self.attempt.job, self.attempt.attempt)
        try:
            await self.redis.xadd(stream, {"b": msgpack.packb(batch)}, maxlen=TELEMETRY_MAXLEN, approximate=True)
        except (RedisError, OSError):
            self.board.give_back(batch)
            return False
        return True

    async def _tail_forever(self) -> None:
        while True:
            await asyncio.sleep(TAIL_S)
            self._collect_logs()

    def _collect_logs(self, *, final: bool = False) -> None:
        for item in self.tail.read(final=final):
            self.board.add(item)

    async def _beat(self) -> None:
        while True:
            await self._report()
            await asyncio.sleep(HEARTBEAT_S)

    async def _report(self) -> bool:
        event = AttemptEvent(
            kind="attempt", v=VERSION, host=self.settings.name, time=time.time(), report=self.attempt.report()
        )
        try:
            await self.redis.xadd(EVENTS_STREAM, {"b": msgpack.packb(event)}, maxlen=100_000, approximate=True)
        except (RedisError, OSError):
            return False
        return True

    async def _watch_cancel(self) -> None:
        key = cancel_key(self.attempt.job, self.attempt.attempt)
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(RedisError, OSError):
                if await self.redis.exists(key):
                    self._end("cancelled", "cancelled on request")
                    return

    async def _say_goodbye(self) -> None:
        """Deliver the rest and the exit. If Redis stays away the host worker repeats the exit report."""
        deadline = time.monotonic() + FAREWELL_S
        while not (await self._publish() and await self._report()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        await self.redis.aclose()

    def _exit_report(self, code: int, started: float) -> ExitReport:
        failure = self.training.failure() or {}
        rank: int | None = failure.get("rank")
        outcome, reason = self._verdict(code, failure)
        tail = self.tail.last_lines(LAUNCHER if rank is None else rank) if outcome == "failed" else []
        return ExitReport(
            v=VERSION,
            job=self.attempt.job,
            attempt=self.attempt.attempt,
            outcome=outcome,
            reason=reason,
            exit_code=failure.get("exit_code", code),
            rank=rank,
            signal=failure["signal"] if failure else _signal_name(code),
            log_tail=tail,
            started=started,
            finished=time.time(),
            summary=self.board.summary(),
        )

    def _verdict(self, code: int, failure: dict[str, Any]) -> tuple[Outcome, str]:
        if self.ended_by is not None:
            return self.ended_by, self.reason
        if code == 0:
            words = program_of(self.order).good_end
            return "succeeded", words.format(steps=self.board.steps, tried=len(self.board.dry_runs))
        if not failure:
            killed_by = _signal_name(code)
            how = f"was killed by {killed_by}" if killed_by else f"ended with exit code {code}"
            return "failed", f"torchrun {how} after step {self.board.steps}"
        rank = failure["rank"]
        if failure["signal"]:
            return "failed", f"rank {rank} was killed by {failure['signal']} after step {self.board.steps}"
        said = next((line for line in reversed(self.tail.last_lines(rank)) if line.strip()), "")
        return "failed", f"rank {rank} ended with exit code {failure['exit_code']}: {said.strip()[:300]}"


def _signal_name(code: int) -> str | None:
    return signal.Signals(-code).name if code < 0 else None


def main() -> int:
    attempt = AttemptDir(Path(sys.argv[1]).resolve())
    identity = process_id(os.getpid())
    assert identity is not None
    write_json(attempt.supervisor, identity._asdict())
    if attempt.exit.exists():  # so late that the host worker has reported this attempt lost: it must not run after all
        return 1
    asyncio.run(Supervisor(attempt, host_settings()).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
