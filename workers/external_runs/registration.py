"""Register a run on the board: open a new run with a user's token, or join an open run with its own token."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from workers.host.supervisor.http_transport import (
    MAX_RETRY_INTERVAL_S,
    MIN_RETRY_INTERVAL_S,
    BoardClient,
    NoAnswerError,
    RunMember,
)


class RunRefusedError(Exception):
    """A registration that the board rejects."""


class BoardRun(NamedTuple):
    """A run on the board, and the token to report it."""

    id: str
    attempt: int
    token: str
    url: str


class RegistrationRequest(NamedTuple):
    """An open run to join, or a request to open one with a user's token.

    `key` is equal on all nodes of the run.
    """

    run: BoardRun | None
    token: str
    request: dict[str, Any]
    key: str | None = None

    def add_size(self, nodes: int, ranks: int) -> RegistrationRequest:
        """Return the request for a number of nodes, with `ranks` on each. Raises RunRefusedError."""
        if nodes > 1 and self.key is None and self.run is None:
            raise RunRefusedError(
                f"The run has {nodes} nodes. Use the same --key on each node, and a new key for each run."
            )
        # After a lost response, the board finds the run by its key.
        key = secrets.token_urlsafe(24) if nodes == 1 or self.key is None else self.key
        return self._replace(request={**self.request, "world_size": nodes * ranks, "nodes": nodes, "key": key})


class RunRegistration:
    """Retry until the board responds. `notify` gets one message if the board is unreachable."""

    def __init__(self, client: BoardClient, request: RegistrationRequest, notify: Callable[[str], None]) -> None:
        self._client, self._request, self._notify = client, request, notify
        self._claim = secrets.token_urlsafe(24)
        self._is_unreachable = False

    async def open(self) -> BoardRun:
        """Return the run. Raises RunRefusedError."""
        if self._request.run is not None:
            return self._request.run
        answer = await self._send("/runs", self._request.request, f"Token {self._request.token}")
        try:
            return BoardRun(str(answer["run"]), int(answer["attempt"]), str(answer["token"]), str(answer["url"]))
        except (KeyError, TypeError, ValueError):
            raise RunRefusedError("the address is not a Meshboard board") from None

    async def join(self, run: BoardRun, node: int, name: str) -> RunMember:
        """Register this node. Raises RunRefusedError."""
        request = {"node": node, "name": name, "claim": self._claim}
        await self._send(f"/runs/{run.id}/{run.attempt}/members", request, f"Run {run.token}")
        return RunMember(run.id, run.attempt, node, run.token, self._claim)

    async def _send(self, path: str, request: dict[str, Any], authorization: str) -> dict[str, Any]:
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        body, interval_s = json.dumps(request).encode(), MIN_RETRY_INTERVAL_S
        while True:
            wait_s = interval_s
            try:
                answer = await asyncio.to_thread(self._client.post, path, body, headers)
            except NoAnswerError as error:
                self._notify_waiting(f"does not answer ({error})")
            else:
                if answer.status in (200, 201):
                    if self._is_unreachable:
                        self._notify("The board answers.")
                    return answer.body
                if answer.status != 429 and answer.status < 500:  # a retry cannot succeed
                    raise RunRefusedError(answer.problem)
                self._notify_waiting(f"cannot accept the run now ({answer.problem})")
                wait_s = answer.retry_after_s or interval_s
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.5))
            interval_s = min(MAX_RETRY_INTERVAL_S, 2 * interval_s)

    def _notify_waiting(self, problem: str) -> None:
        if not self._is_unreachable:
            self._notify(f"The board {problem}. Training continues. The run is reported when the board answers.")
        self._is_unreachable = True
