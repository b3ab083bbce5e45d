"""The line of whoever has no key to Redis: HTTPS, with the token of one run."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from contracts.codec import encode_report
from contracts.control import AttemptReport
from workers.host.supervisor.line import LineError, Ready, RefusedError
from workers.host.supervisor.line.https import Answer, AwayError, Board

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0  # between tries while the board is away, before jitter
FRESH_S = 15.0  # how long an answer says whether to end: a report is due every 5 s
ENDED = 410  # the board's word for a run that is over


class Membership(NamedTuple):
    """Who speaks: one node of one attempt of a run. `claim` is the secret it joined with."""

    run: str
    attempt: int
    node: int
    token: str
    claim: str

    @property
    def path(self) -> str:
        return f"/runs/{self.run}/{self.attempt}/members/{self.node}"

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Authorization": f"Run {self.token}",
            "Meshboard-Claim": self.claim,
            "Content-Type": "application/msgpack",
        }


class HttpLine:
    """A `Line` over HTTPS.

    A batch has its number until the board has it or will not: it takes each number once. What it says of being away,
    back or refused goes to `tell`, once each.
    """

    def __init__(self, board: Board, who: Membership, tell: Callable[[str], None] = log.warning) -> None:
        self._board, self._who, self._tell = board, who, tell
        self._number = 0  # of the next batch
        self._not_before = 0.0
        self._failures = 0
        self._away = self._over = self._refused = False
        self._heard, self._cancel = 0.0, False

    @property
    def over(self) -> bool:
        """The board takes nothing more, whatever is said."""
        return self._over

    async def publish(self, batch: bytes) -> None:
        await self._say(f"{self._who.path}/batches?n={self._number}", batch, {})
        self._number += 1

    async def report(self, report: AttemptReport) -> None:
        body = zlib.compress(encode_report(report))
        await self._say(f"{self._who.path}/report", body, {"Content-Encoding": "deflate"})

    async def cancelled(self) -> bool:
        """As the last answer told it: reports and batches ask often enough."""
        if not self._over and time.monotonic() - self._heard > FRESH_S:
            raise LineError("the board did not answer recently")
        return self._cancel

    async def asked_to_save(self) -> bool:
        """Never by the board: what it launched through another engine gives way there."""
        return False

    async def lent_at(self, host: str) -> None:
        """Nowhere: all nodes of an allocation see the same files."""

    async def wanted(self) -> frozenset[int]:
        """Nobody can ask a run elsewhere: the board's answers do not tell."""
        return frozenset()

    async def renew(self) -> None:
        """The board sees to it with each batch."""

    async def now(self) -> float:
        with _understood():
            return float((await self._meet({}))["now"])

    async def say_ready(self, node: int, ready: Ready) -> None:
        """Of our own node alone: the board knows which that is."""
        await self._meet(ready._asdict())

    async def who_is_ready(self) -> dict[int, Ready]:
        with _understood():
            ready = (await self._meet({}))["ready"]
            return {int(one["node"]): Ready(str(one["address"]), int(one["port"])) for one in ready}

    async def close(self) -> None:
        await asyncio.to_thread(self._board.close)

    async def _meet(self, said: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        return await self._say(f"{self._who.path}/meet", json.dumps(said).encode(), headers)

    async def _say(self, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """What the board answers.

        Raises:
            RefusedError: it is not wanted, now or later.
            LineError: nobody answered, the board could not take it now, or it is too early to try again.
        """
        if self._over:
            raise RefusedError("the run has ended on the board")
        left = self._not_before - time.monotonic()
        if left > 0:
            raise LineError(f"next retry in {left:.1f} s")
        try:
            answer = await asyncio.to_thread(self._board.post, path, body, {**self._who.headers, **headers})
        except AwayError as error:
            self._wait(None)
            self._tell_once(f"The board does not answer ({error}). Training continues, and reports are buffered.")
            raise LineError(str(error)) from None
        self._take_in(answer)
        return answer.told

    def _take_in(self, answer: Answer) -> None:
        if answer.status == 200 and not isinstance(answer.told.get("cancel"), bool):
            answer = Answer(502, {}, None)  # a proxy's own page, say
        if answer.status == 429 or answer.status >= 500:
            self._wait(answer.retry_after_s)
            if answer.status != 429:
                self._tell_once(
                    f"The board returned an error ({answer.problem}). Training continues, and reports are buffered."
                )
            raise LineError(answer.problem)
        self._failures = 0
        if answer.status in (200, ENDED):
            self._heard, self._cancel = time.monotonic(), answer.told.get("cancel") is True
        if answer.status == 200:
            if self._away:
                self._away = False
                self._tell("The board answers again.")
            return
        self._over = answer.status in (401, 403, 404, ENDED) and answer.field != "message"
        if self._over:
            self._tell(f"The board accepts no more reports of this run ({answer.problem}). Training continues.")
        elif not self._refused:
            self._tell(f"The board refused a report ({answer.problem}). The report is dropped.")
            self._refused = True
        raise RefusedError(answer.problem)

    def _wait(self, told_s: float | None) -> None:
        """Before the next try: as long as the board asks for, else twice as long as last time, not all at once."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 10)) if told_s is None else told_s
        self._failures += 1
        self._not_before = time.monotonic() + pause_s * random.uniform(1.0, 1.5)

    def _tell_once(self, words: str) -> None:
        if not self._away:
            self._tell(words)
        self._away = True


@contextmanager
def _understood() -> Iterator[None]:
    """An answer that lacks what was asked for is none."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise LineError(f"the board sent an invalid answer: {error!r}") from None
