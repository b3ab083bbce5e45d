"""HTTP to one board: what is safe to repeat is repeated while the board is away or busy; every refusal is in words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from meshboard.errors import AwayError, RefusedError

TRIES = 5  # of a request that the board could not take just now
BUSY_S = 1.0  # between two of them where the board names no time
LONGEST_PAUSE_S = 60.0
SILENCE_S = 45.0  # of a stream, in which the board says something each 15 s, before it counts as broken


class Door:
    """Speaks to one board with one token."""

    def __init__(self, url: str, token: str, timeout_s: float, verify: bool | str) -> None:
        self.url = url.rstrip("/")
        self.was_there = False  # it has answered as a board does
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Token {token}", "Accept": "application/json"},
            timeout=timeout_s,
            verify=verify,
        )

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, path: str, *, patience_s: float = 0.0, **how: Any) -> httpx.Response:
        """Asks that change nothing, and those with a key, are repeated while the board is away; no others are.
        `patience_s`: how much longer than usual the answer may take.

        Raises:
            RefusedError, AwayError
        """
        safe = method in ("GET", "PUT", "DELETE") or "Idempotency-Key" in how.get("headers", {})
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                response = self._http.request(method, path, timeout=self._timeout_s + patience_s, **how)
            except httpx.TransportError as error:
                if last or not safe:
                    raise AwayError(f"{self.url} cannot be reached: {error}") from None
                time.sleep(backoff_s(attempt))
            except httpx.InvalidURL as error:
                raise AwayError(f"{self.url} is no address: {error}") from None
            else:
                if response.status_code not in (429, 503) or last:
                    return self._answer(response)
                time.sleep(retry_after_s(response))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def stream(self, path: str, **how: Any) -> Iterator[httpx.Response]:
        """An answer to be read as it comes, once; nothing is repeated.

        Raises:
            RefusedError, AwayError
        """
        waits = httpx.Timeout(self._timeout_s, read=SILENCE_S)
        try:
            with self._http.stream("GET", path, timeout=waits, **how) as response:
                if not response.is_success:
                    response.read()
                yield self._answer(response)
        except httpx.TransportError as error:
            raise AwayError(f"{self.url} cannot be reached: {error}") from None
        except httpx.InvalidURL as error:
            raise AwayError(f"{self.url} is no address: {error}") from None

    def _answer(self, response: httpx.Response) -> httpx.Response:
        """Raises RefusedError, AwayError."""
        told = checked(response)
        self.was_there = True
        return told


def backoff_s(attempt: int) -> float:
    return float(2.0**attempt / 2)


def retry_after_s(response: httpx.Response) -> float:
    """How long a busy board wants to be left alone."""
    told = response.headers.get("Retry-After", "")
    return min(float(told), LONGEST_PAUSE_S) if told.isascii() and told.isdigit() else BUSY_S


def checked(response: httpx.Response) -> httpx.Response:
    """The answer, where it is none that refuses.

    Raises:
        RefusedError: with every problem.
        AwayError: nothing that a board says.
    """
    if response.is_success:
        return response
    try:
        problems = problems_of(response.json())
    except ValueError:
        problems = []
    if not problems and response.status_code not in (401, 403, 404):
        raise AwayError(f"{response.url} answered {response.status_code} and nothing that a board says")
    raise RefusedError(response.status_code, problems or [("request", f"HTTP {response.status_code}")])


def problems_of(told: Any) -> list[tuple[str, str]]:
    """(field, message) of each, as a board tells them; none where it is no board that speaks."""
    try:
        return [(str(error["field"]), str(error["message"])) for error in told["errors"]]
    except (KeyError, TypeError):
        return []
