"""Becoming a run on the board: opened by a person's token, or joined by the token of a run that another node opened."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from workers.host.supervisor.line.https import Answer, AwayError, Board
from workers.host.supervisor.line.over_http import Membership

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0


class RefusedError(Exception):
    """The board heard it and will not have it; says why."""


class Run(NamedTuple):
    """A run of the board, and the token that reports it."""

    id: str
    attempt: int
    token: str
    url: str


class Asked(NamedTuple):
    """How to come by a run: `run` where one is named, else `request` with a person's token."""

    run: Run | None
    token: str
    request: dict[str, Any]


class Joining:
    """Speaks until the board answers. What it says of being away goes to `tell`, once."""

    def __init__(self, board: Board, asked: Asked, tell: Callable[[str], None]) -> None:
        self._board, self._asked, self._tell = board, asked, tell
        self._claim = secrets.token_urlsafe(24)
        self._away = False

    async def open(self) -> Run:
        """
        Raises:
            RefusedError: the board will not have it.
        """
        if self._asked.run is not None:
            return self._asked.run
        told = await self._ask("/runs", self._asked.request, f"Token {self._asked.token}")
        try:
            return Run(str(told["run"]), int(told["attempt"]), str(told["token"]), str(told["url"]))
        except (KeyError, TypeError, ValueError):
            raise RefusedError("the address is not a Meshboard board") from None

    async def join(self, run: Run, node: int, name: str) -> Membership:
        """
        Raises:
            RefusedError: the board will not have it.
        """
        request = {"node": node, "name": name, "claim": self._claim}
        await self._ask(f"/runs/{run.id}/{run.attempt}/members", request, f"Run {run.token}")
        return Membership(run.id, run.attempt, node, run.token, self._claim)

    async def _ask(self, path: str, request: dict[str, Any], authorization: str) -> dict[str, Any]:
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        body, pause_s = json.dumps(request).encode(), FIRST_PAUSE_S
        while True:
            try:
                answer = await asyncio.to_thread(self._board.post, path, body, headers)
            except AwayError as error:
                self._wait_for(f"does not answer ({error})")
                await asyncio.sleep(pause_s * random.uniform(1.0, 1.5))
            else:
                if answer.status in (200, 201):
                    if self._away:
                        self._tell("The board answers.")
                    return answer.told
                await asyncio.sleep(self._pause_or_refuse(answer, pause_s))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _pause_or_refuse(self, answer: Answer, pause_s: float) -> float:
        """Seconds until the next try. Raises RefusedError where there is to be none."""
        if answer.status != 429 and answer.status < 500:
            raise RefusedError(answer.problem)
        self._wait_for(f"cannot accept the run now ({answer.problem})")
        return (answer.retry_after_s or pause_s) * random.uniform(1.0, 1.5)

    def _wait_for(self, why: str) -> None:
        if not self._away:
            self._tell(f"The board {why}. Training continues. The run is reported when the board answers.")
        self._away = True
