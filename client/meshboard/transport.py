"""HTTP requests to one board: retries, streams, and errors as text."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from meshboard.credentials import parse_board_url
from meshboard.errors import AwayError, RefusedError, WrongError, format_error

MAX_TRIES = 5  # of a request while the board is away or busy
RETRY_AFTER_S = 1.0  # if a busy board names no time
MAX_RETRY_AFTER_S = 60.0
MIN_TRY_S = 1.0  # time limit of a request after the deadline
STREAM_TIMEOUT_S = 45.0  # without data. The board sends something every 15 s
MAX_OUTAGE_S = 600.0  # of a board that answered before, for example during an upgrade
OUTAGE_RETRY_S = 1.0
MAX_QUOTED_CHARACTERS = 100  # of a page that is not a response of the REST API
NO_BOARD = ", but not the response of a board. Check that MESHBOARD_URL is the address of a board, without a path."
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Response(NamedTuple):
    """Decoded JSON of a response, and the response."""

    content: Any
    http: httpx.Response


class Event(NamedTuple):
    """Server-sent event. `id` is the position to resume from, or "" if the event has none."""

    name: str
    data: Any
    id: str


class RestTransport:
    """HTTP connection to one board with one token."""

    def __init__(self, url: str, token: str, timeout_s: float, verify: bool | str) -> None:
        """Raises WrongError if `url` is not the address of a board."""
        self.url = parse_board_url(url)
        self.has_answered = False  # as a board does
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Token {token}", "Accept": "application/json"},
            timeout=timeout_s,
            verify=_load_certificates(verify) if isinstance(verify, str) else verify,
        )

    def close(self) -> None:
        self._http.close()

    def send(
        self, method: str, parts: Sequence[str], *, extra_s: float = 0.0, deadline: float = math.inf, **options: Any
    ) -> Response:
        """Send a request, and repeat it while the board is away or busy if a repetition is safe.

        Requests that change nothing and requests with an idempotency key are safe to repeat.
        A repeated DELETE succeeds if the board has deleted the object already.

        Args:
            parts: Parts of the address below /api/v1/.
            extra_s: Seconds that the response may take in addition to the timeout.
            deadline: Monotonic time at which the last try ends.

        Raises:
            RefusedError, AwayError
            WrongError: A part is not a valid name, or a value is not text. Nothing was sent.
        """
        path = build_path(*parts)
        is_safe = method in ("GET", "PUT", "DELETE") or "Idempotency-Key" in options.get("headers", {})
        maybe_done = False
        for attempt in range(MAX_TRIES):
            left_s = max(deadline - time.monotonic(), MIN_TRY_S)
            is_last = attempt == MAX_TRIES - 1 or left_s <= MIN_TRY_S
            try:
                timeout_s = min(self._timeout_s + extra_s, left_s)
                response = self._http.request(method, path, timeout=timeout_s, **options)
            except httpx.RequestError as error:
                if is_last or not is_safe:
                    raise AwayError(f"Cannot reach {self.url}: {format_error(error)}") from None
                maybe_done = maybe_done or not isinstance(error, NOT_SENT)
                time.sleep(min(get_backoff_s(attempt), left_s))
            except (httpx.InvalidURL, ValueError) as error:
                raise WrongError(f"Cannot send the request: {error}") from None
            else:
                # A proxy may return 503 although the board did the work.
                is_busy = response.status_code == 429 or (response.status_code == 503 and is_safe)
                if maybe_done and method == "DELETE" and is_missing(response):
                    return Response(None, response)
                maybe_done = maybe_done or response.status_code == 503
                if is_last or not is_busy:
                    return self._decode(check_response(response, parts))
                time.sleep(min(get_retry_after_s(response), left_s))
        raise AssertionError("the last try returns or raises")

    @contextmanager
    def stream(self, parts: Sequence[str], media_type: str, **options: Any) -> Iterator[httpx.Response]:
        """Send a GET request once, and yield its response before the body is complete.

        Raises:
            RefusedError, AwayError
            WrongError: A part is not a valid name. Nothing was sent.
        """
        timeout = httpx.Timeout(self._timeout_s, read=STREAM_TIMEOUT_S)
        try:
            with self._http.stream("GET", build_path(*parts), timeout=timeout, **options) as response:
                if not response.is_success:
                    response.read()
                if not check_response(response, parts).headers.get("Content-Type", media_type).startswith(media_type):
                    response.read()
                    raise describe_page(response)
                self.has_answered = True
                yield response
        except httpx.RequestError as error:
            raise AwayError(f"Cannot reach {self.url}: {format_error(error)}") from None
        except httpx.InvalidURL as error:
            raise WrongError(f"Cannot send the request: {error}") from None

    def follow_events(self, parts: Sequence[str], **query: Any) -> Iterator[Event]:
        """Yield server-sent events until the event `end`, and resume after a broken connection.

        Raises:
            RefusedError: The request is not allowed, or the right to see the job ended.
            AwayError: The board has never answered, or is away for MAX_OUTAGE_S.
        """
        last_id, outage = "", OutageTimer(has_answered=self.has_answered)
        while True:
            try:
                headers = {"Last-Event-ID": last_id} if last_id else {}
                with self.stream(parts, "text/event-stream", params=query, headers=headers) as response:
                    for event in parse_events(response.iter_lines()):
                        outage.reset()
                        last_id = event.id or last_id
                        yield _check_event(event)
                        if event.name == "end":
                            return
            except (AwayError, RefusedError) as error:
                outage.wait_or_raise(error)
                continue
            except ValueError as error:
                raise AwayError(f"{self.url} sent an invalid event: {error}") from None
            time.sleep(OUTAGE_RETRY_S)

    def _decode(self, response: httpx.Response) -> Response:
        """Raises AwayError if the response is a page, for example a login page of a proxy."""
        try:
            content = None if response.status_code == 204 else response.json()
        except ValueError:
            raise describe_page(response) from None
        self.has_answered = True
        return Response(content, response)


class OutageTimer:
    """Limits how long a caller waits for a board that answered before."""

    def __init__(self, *, has_answered: bool = True) -> None:
        self._answered_at = time.monotonic() if has_answered else None

    def reset(self) -> None:
        """Note that the board answered."""
        self._answered_at = time.monotonic()

    def wait_or_raise(self, error: AwayError | RefusedError) -> None:
        """Wait before the next try.

        Raises:
            AwayError, RefusedError: `error`, if it does not pass, the board has never answered, or MAX_OUTAGE_S passed.
        """
        may_pass = isinstance(error, AwayError) or error.status == 429 or error.status >= 500
        if self._answered_at is None or not may_pass or time.monotonic() - self._answered_at > MAX_OUTAGE_S:
            raise error
        time.sleep(OUTAGE_RETRY_S)


def build_path(*parts: str) -> str:
    """Return an address below /api/v1/ with percent-encoded parts.

    Raises:
        WrongError: A part would change the address. Proxies and servers decode %2F and resolve `..`.
    """
    return "/".join(map(_encode_part, parts))


def _encode_part(part: str) -> str:
    if part in ("", ".", "..") or "/" in part:
        raise WrongError(f"The name is {part!r}. A name cannot be empty, '.', or '..', and cannot contain '/'.")
    try:
        return quote(part, safe="")
    except UnicodeEncodeError:
        raise WrongError(f"The name is {part!r}. Use valid Unicode text.") from None


def _load_certificates(path: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in a file or a folder."""
    is_folder = Path(path).is_dir()
    return ssl.create_default_context(cafile=None if is_folder else path, capath=path if is_folder else None)


def get_backoff_s(attempt: int) -> float:
    """Return the pause after a failed try, which doubles with each try."""
    return float(2.0**attempt / 2)


def get_retry_after_s(response: httpx.Response) -> float:
    """Return the pause that a busy board requests."""
    seconds = response.headers.get("Retry-After", "")
    return min(float(seconds), MAX_RETRY_AFTER_S) if seconds.isascii() and seconds.isdigit() else RETRY_AFTER_S


def check_response(response: httpx.Response, parts: Sequence[str]) -> httpx.Response:
    """Return a successful response.

    Raises:
        RefusedError: The board rejected the request.
        AwayError: The response is not from a board.
    """
    if response.is_success:
        return response
    try:
        document = response.json()
    except ValueError:
        document = None
    problems = parse_problems(document)
    if not problems and response.status_code not in (401, 403, 404):
        raise AwayError(f"{response.url} returned HTTP {response.status_code}, but not the response of a board.")
    fallback = [("request", f"HTTP {response.status_code}{NO_BOARD if response.status_code == 404 else ''}")]
    labels = name_parameters(parts, response.status_code) if problems else {}
    raise RefusedError(response.status_code, problems or fallback, document if problems else None, labels)


def name_parameters(parts: Sequence[str], status: int) -> dict[str, str]:
    """Return readable names of the parameters of an address, such as "job abc" for `job_id`."""
    match list(parts):
        case ["jobs", job_id, *_]:
            names = {"job_id": f"job {job_id}"}
        case ["projects", project, "baselines", *branch] if branch:
            names = {"branch": f"baseline {'/'.join(branch)} of project {project}", "project": f"project {project}"}
        case ["uploads", *_]:
            names = {"file": "upload"}
        case ["projects", project, *_]:
            names = {"project": f"project {project}"}
        case _:
            return {}
    # An older board reports a missing object as a problem of the request.
    return {**names, "request": next(iter(names.values()))} if status == 404 else names


def is_missing(response: httpx.Response) -> bool:
    """Return whether the board reports that the object does not exist. A proxy may return 404 too."""
    try:
        return response.status_code == 404 and bool(parse_problems(response.json()))
    except ValueError:
        return False


def describe_page(response: httpx.Response) -> AwayError:
    """Return the error for a response that is not from the REST API."""
    start = " ".join(response.text.split())[:MAX_QUOTED_CHARACTERS]
    return AwayError(f"{response.url} returned a page instead of the REST API. The page begins with {start!r}.")


def parse_problems(document: Any) -> list[tuple[str, str]]:
    """Return (field, message) of each problem in a problem document, or [] for another document."""
    try:
        return [(str(error["field"]), str(error["message"])) for error in document["errors"]]
    except (KeyError, TypeError):
        return []


def _check_event(event: Event) -> Event:
    """Raise RefusedError if the right to see the job ended."""
    if event.name == "error":
        raise RefusedError(int(event.data["status"]), parse_problems(event.data), event.data)
    return event


def parse_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the complete server-sent events in these lines.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    name, data, last_id = "", list[str](), ""
    for line in lines:
        if not line:
            if data:
                yield Event(name or "message", json.loads("\n".join(data)), last_id)
            name, data, last_id = "", [], ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            last_id = value
