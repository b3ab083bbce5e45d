"""HTTP to one board: what is safe to repeat is repeated while the board is away or busy; every refusal is in words."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from meshboard.access import address
from meshboard.errors import AwayError, RefusedError, WrongError, why
from meshboard.paths import path

TRIES = 5  # of a request that the board could not take just now
BUSY_S = 1.0  # between two of them where the board names no time
LONGEST_PAUSE_S = 60.0
LEAST_S = 1.0  # for a try after which there is no time left
LONGEST_QUOTE = 100  # of a page that is not the API's
NO_BOARD = ", but not the response of a board. Check that MESHBOARD_URL is the address of a board, without a path."
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
SILENCE_S = 45.0  # of a stream, in which the board says something each 15 s, before it counts as broken


class Answer(NamedTuple):
    """What a board told, and what came with it."""

    told: Any
    response: httpx.Response


def _trusting(place: str) -> ssl.SSLContext:
    """Certificates in a file or a folder."""
    is_folder = Path(place).is_dir()
    return ssl.create_default_context(cafile=None if is_folder else place, capath=place if is_folder else None)


class Door:
    """Speaks to one board with one token."""

    def __init__(self, url: str, token: str, timeout_s: float, verify: bool | str) -> None:
        """Raises WrongError: `url` is no address of a board."""
        self.url = address(url)
        self.was_there = False  # it has answered as a board does
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Token {token}", "Accept": "application/json"},
            timeout=timeout_s,
            verify=_trusting(verify) if isinstance(verify, str) else verify,
        )

    def close(self) -> None:
        self._http.close()

    def send(
        self, method: str, parts: Sequence[str], *, patience_s: float = 0.0, until: float = math.inf, **how: Any
    ) -> Answer:
        """Asks that change nothing, and those with a key, are repeated while the board is away; no others are. A DELETE
        whose answer was lost has deleted what is not there when it is repeated.
        `parts`: of the address below /api/v1/. `patience_s`: how much longer than usual the answer may take.
        `until`: on the monotonic clock, when the last try is over.

        Raises:
            RefusedError, AwayError
            WrongError: what is no text, or a part that is no name; nothing was sent.
        """
        where = path(*parts)
        safe = method in ("GET", "PUT", "DELETE") or "Idempotency-Key" in how.get("headers", {})
        maybe_done = False
        for attempt in range(TRIES):
            left_s = max(until - time.monotonic(), LEAST_S)
            last = attempt == TRIES - 1 or left_s <= LEAST_S
            try:
                waits_s = min(self._timeout_s + patience_s, left_s)
                response = self._http.request(method, where, timeout=waits_s, **how)
            except httpx.RequestError as error:
                if last or not safe:
                    raise AwayError(f"Cannot reach {self.url}: {why(error)}") from None
                maybe_done = maybe_done or not isinstance(error, NOT_SENT)
                time.sleep(min(backoff_s(attempt), left_s))
            except (httpx.InvalidURL, ValueError) as error:
                raise WrongError(f"Cannot send the request: {error}") from None
            else:
                undone = response.status_code == 429 or (
                    response.status_code == 503 and safe
                )  # what a 503 of a proxy did is not known
                if maybe_done and method == "DELETE" and is_gone(response):
                    return Answer(None, response)
                maybe_done = maybe_done or response.status_code == 503
                if last or not undone:
                    return self._told(checked(response, parts))
                time.sleep(min(retry_after_s(response), left_s))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def stream(self, parts: Sequence[str], media_type: str, **how: Any) -> Iterator[httpx.Response]:
        """An answer to be read as it comes, once; nothing is repeated.

        Raises:
            RefusedError, AwayError
            WrongError: a part that is no name; nothing was sent.
        """
        waits = httpx.Timeout(self._timeout_s, read=SILENCE_S)
        try:
            with self._http.stream("GET", path(*parts), timeout=waits, **how) as response:
                if not response.is_success:
                    response.read()
                if not checked(response, parts).headers.get("Content-Type", media_type).startswith(media_type):
                    response.read()
                    raise page(response)
                self.was_there = True
                yield response
        except httpx.RequestError as error:
            raise AwayError(f"Cannot reach {self.url}: {why(error)}") from None
        except httpx.InvalidURL as error:
            raise WrongError(f"Cannot send the request: {error}") from None

    def _told(self, response: httpx.Response) -> Answer:
        """Raises AwayError: it is a page, such as one that wants a login, or says that the board is being mended."""
        try:
            told = None if response.status_code == 204 else response.json()
        except ValueError:
            raise page(response) from None
        self.was_there = True
        return Answer(told, response)


def backoff_s(attempt: int) -> float:
    return float(2.0**attempt / 2)


def retry_after_s(response: httpx.Response) -> float:
    """How long a busy board wants to be left alone."""
    told = response.headers.get("Retry-After", "")
    return min(float(told), LONGEST_PAUSE_S) if told.isascii() and told.isdigit() else BUSY_S


def checked(response: httpx.Response, parts: Sequence[str]) -> httpx.Response:
    """The answer, where it is none that refuses.

    Raises:
        RefusedError: with every problem.
        AwayError: nothing that a board says.
    """
    if response.is_success:
        return response
    try:
        told = response.json()
    except ValueError:
        told = None
    problems = problems_of(told)
    if not problems and response.status_code not in (401, 403, 404):
        raise AwayError(f"{response.url} returned HTTP {response.status_code}, but not the response of a board.")
    fallback = [("request", f"HTTP {response.status_code}{NO_BOARD if response.status_code == 404 else ''}")]
    about = named(parts, response.status_code) if problems else {}
    raise RefusedError(response.status_code, problems or fallback, told if problems else None, about)


def named(parts: Sequence[str], status: int) -> dict[str, str]:
    """What an address is of, by the names of its parameters, which say nothing to people. An older board's "no such
    thing" is of the request as a whole."""
    match list(parts):
        case ["jobs", job_id, *_]:
            found = {"job_id": f"job {job_id}"}
        case ["projects", project, "baselines", *branch] if branch:
            found = {"branch": f"baseline {'/'.join(branch)} of project {project}", "project": f"project {project}"}
        case ["projects", project, *_]:
            found = {"project": f"project {project}"}
        case _:
            return {}
    return {**found, "request": next(iter(found.values()))} if status == 404 else found


def is_gone(response: httpx.Response) -> bool:
    """The board says that there is no such thing; another's 404 says nothing of it."""
    try:
        return response.status_code == 404 and bool(problems_of(response.json()))
    except ValueError:
        return False


def page(response: httpx.Response) -> AwayError:
    """What to say of an answer that is none of the API's, with how it begins."""
    begins = " ".join(response.text.split())[:LONGEST_QUOTE]
    return AwayError(f"{response.url} returned a page instead of the REST API. The page begins with {begins!r}.")


def problems_of(told: Any) -> list[tuple[str, str]]:
    """(field, message) of each, as a board tells them; none where it is no board that speaks."""
    try:
        return [(str(error["field"]), str(error["message"])) for error in told["errors"]]
    except (KeyError, TypeError):
        return []
