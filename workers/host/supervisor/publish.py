"""What an attempt says of itself while it runs, batch by batch and no faster than it may."""

from __future__ import annotations

from contracts.codec import MAX_BATCH_BYTES, encode_batch
from contracts.telemetry.batches import Batch, Item
from contracts.telemetry.vocabulary import VERSION
from workers.host.supervisor.board import Board, Load
from workers.host.supervisor.bucket import Bucket
from workers.host.supervisor.clock import BoardClock
from workers.host.supervisor.line import Line, LineError, RefusedError

# What is not sent while the board is away is saved up: a minute's outage costs nothing.
SEND_BYTES_PER_S, SEND_BURST = 2**20, 16 * 2**20  # of one attempt
LOG_BYTES_PER_S, LOG_BURST = 128 * 2**10, 4 * 2**20  # of these, log lines


class Publisher:
    """Takes what waits on the `Board` and says it over a `Line`.

    A batch that the board may have is kept, and said again as it was: made anew under its number it would be left out
    as one that is known.
    """

    def __init__(
        self, job: str, attempt: int, board: Board, line: Line, host: str = "", clock: BoardClock | None = None
    ) -> None:
        """Of a `host` that tells its name each batch does, and times are the board's by `clock`."""
        self._job, self._attempt = job, attempt
        self._board, self._line = board, line
        self._host, self._clock = host, clock or BoardClock()
        self._unsure: tuple[Load, bytes] | None = None
        self._all, self._logs = Bucket(SEND_BYTES_PER_S, SEND_BURST), Bucket(LOG_BYTES_PER_S, LOG_BURST)

    async def send(self) -> bool:
        """Send what waits, as far as it may. False when the board did not take it."""
        while (on_its_way := self._unsure or self._next()) is not None:
            self._unsure = load, body = on_its_way
            try:
                await self._line.publish(body)
            except RefusedError:
                self._unsure = None
                self._board.lose(len(load.items))
                return False
            except LineError:
                return False
            self._unsure = None
            self._all.spend(len(body))
            self._logs.spend(load.log_size)
        self._board.thin_logs()
        return True

    async def send_last(self, *, late: bool) -> bool:
        """Send what waits when no more comes. False while some of it waits on. `late`: of lines only their number."""
        self._board.tell_skipped(late=late)
        return await self.send() and (late or self._board.is_empty())

    def _next(self) -> tuple[Load, bytes] | None:
        load = self._board.take(min(self._all.level(), MAX_BATCH_BYTES), self._logs.level())
        return None if load is None else (load, encode_batch(self._batch(load.items)))

    def _batch(self, items: list[Item]) -> Batch:
        batch = Batch(v=VERSION, job=self._job, attempt=self._attempt, time=self._clock.now(), items=items)
        if self._host:
            batch["host"] = self._host
        if clock := self._clock.told():
            batch["clock"] = clock
        return batch
