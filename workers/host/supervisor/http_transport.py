"""The transport of a run without a key to Redis: HTTPS to the board, with the token of the run.

The client keeps one connection open. It verifies the server's name, and uses the proxy from the environment variables.
Plain HTTP is allowed only to loopback, because a token goes with every request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import ipaddress
import json
import logging
import random
import socket
import ssl
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from contracts.codec import encode_report
from contracts.control import AttemptReport
from workers.host.supervisor.publisher import MessageRefusedError, ReadyMember, TransportError

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 2**20
DOWNLOAD_PART_BYTES = 2**16
DOWNLOAD_TIMEOUT_S = 120.0
MIN_RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S = 0.5, 5.0  # before jitter
MAX_ANSWER_AGE_S = 15.0  # of the cancel flag; a report is due every 5 s
STATUS_RUN_ENDED = 410


class BadUrlError(ValueError):
    """An invalid address of the board."""


class NoAnswerError(Exception):
    """A request without a response. The board may have accepted the request."""


class BoardAnswer(NamedTuple):
    """A response of the board. `body` is its JSON object, or {} if the response is not an object."""

    status: int
    body: dict[str, Any]
    retry_after_s: float | None

    @property
    def problem(self) -> str:
        """Return the message of an error response, on one line."""
        message = " ".join(str(self._error.get("message", ""))[:500].split()) or f"HTTP {self.status}"
        return message if self.field == "request" or self._error.get("in") == "path" else f"{self.field}: {message}"

    @property
    def field(self) -> str:
        """Return the field that an error is about, or "request" for all of it."""
        return str(self._error.get("field", "request"))[:100]

    @property
    def _error(self) -> dict[str, Any]:
        errors = self.body.get("errors")
        first = errors[0] if isinstance(errors, list) and errors else None
        return first if isinstance(first, dict) else {}


class BoardClient:
    """An HTTP client of the board. Thread-safe, with one request at a time."""

    def __init__(self, url: str, ca_file: Path | None = None, *, allows_http: bool = False) -> None:
        """Check the address. Raises BadUrlError, OSError."""
        self._url = _check_url(url, allows_http=allows_http)
        self._tls = ssl.create_default_context(cafile=ca_file) if self._url.scheme == "https" else None
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._download: http.client.HTTPConnection | None = None
        self.stopped = threading.Event()

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> BoardAnswer:
        """POST to a path below the board's API.

        A request on an open connection that the board has closed is sent again, so the board can receive it twice.
        Raises NoAnswerError.
        """
        with self._lock:
            while True:
                was_open = self._connection is not None
                try:
                    return self._send(path, body, headers)
                except (http.client.HTTPException, OSError) as error:
                    self._disconnect()
                    if not was_open or isinstance(error, TimeoutError):
                        raise NoAnswerError(_describe(error)) from None

    def download(self, path: str, headers: dict[str, str], file: IO[bytes], max_bytes: int) -> BoardAnswer:
        """GET a path below the board's API, and write at most `max_bytes` + 1 bytes of a 200 response to a file.

        Raises:
            NoAnswerError: The response is missing or incomplete.
            OSError: The file cannot be written.
        """
        deadline, left = time.monotonic() + DOWNLOAD_TIMEOUT_S, max_bytes + 1
        try:
            connection = self._connect()
        except OSError as error:
            raise NoAnswerError(_describe(error)) from None
        self._download = connection
        with contextlib.closing(connection):
            if self.stopped.is_set():
                raise NoAnswerError("the download was stopped")
            try:
                connection.request("GET", f"{self._url.path.rstrip('/')}/api/v1{path}", headers=headers)
                response = connection.getresponse()
                if response.status != 200:
                    return BoardAnswer(response.status, _parse_object(response.read(MAX_ANSWER_BYTES)), None)
            except (http.client.HTTPException, OSError) as error:
                raise NoAnswerError(_describe(error)) from None
            while left > 0 and (part := _read_part(response, min(left, DOWNLOAD_PART_BYTES))):
                file.write(part)
                left -= len(part)
                if time.monotonic() > deadline:
                    raise NoAnswerError(f"the download took longer than {DOWNLOAD_TIMEOUT_S:.0f} s")
        return BoardAnswer(response.status, {}, None)

    def stop(self) -> None:
        """End a download of another thread."""
        self.stopped.set()
        sock = None if self._download is None else self._download.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> BoardAnswer:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", f"{self._url.path.rstrip('/')}/api/v1{path}", body, headers)
        response = self._connection.getresponse()
        content = response.read(MAX_ANSWER_BYTES)
        if response.will_close or not response.isclosed():
            self._disconnect()
        retry_after = response.getheader("Retry-After") or ""
        is_valid = retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6
        return BoardAnswer(response.status, _parse_object(content), float(retry_after) if is_valid else None)

    def _connect(self) -> http.client.HTTPConnection:
        host, tls = self._url.hostname, self._tls
        assert host is not None, "the address was checked"
        if tls is None:
            return http.client.HTTPConnection(host, self._url.port, timeout=REQUEST_TIMEOUT_S)
        proxy = _find_proxy(self._url)
        if proxy is None:
            return http.client.HTTPSConnection(host, self._url.port, timeout=REQUEST_TIMEOUT_S, context=tls)
        connection = http.client.HTTPSConnection(
            proxy.hostname or "", proxy.port, timeout=REQUEST_TIMEOUT_S, context=tls
        )
        headers = {}
        if proxy.username is not None:
            credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            headers["Proxy-Authorization"] = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        connection.set_tunnel(host, self._url.port or 443, headers)
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
        self._connection = None


def _read_part(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Return the next bytes of a body, or no bytes at its end. Raises NoAnswerError."""
    try:
        part = response.read(max_bytes)
    except (http.client.HTTPException, OSError) as error:
        raise NoAnswerError(_describe(error)) from None
    if not part and response.length:
        raise NoAnswerError("the connection was closed in the middle of the response")
    return part


def _check_url(url: str, *, allows_http: bool) -> SplitResult:
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise BadUrlError(f"{url[:200]!r} is not an address: {error}") from None
    if parts.scheme not in ("https", "http") or not host or parts.query or parts.fragment:
        raise BadUrlError(f"The address is {url[:200]!r}. Use an address such as https://board.example.org.")
    if parts.username is not None or parts.password is not None:
        raise BadUrlError("Remove the user name and password from the address. Meshboard sends the token in a header.")
    if parts.scheme == "http" and not (allows_http or _is_loopback(host)):
        raise BadUrlError(f"{url[:200]!r} would send the token unencrypted. Use https://, or http:// on loopback.")
    return parts


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _find_proxy(url: SplitResult) -> SplitResult | None:
    """Return the proxy for HTTPS in https_proxy or all_proxy, unless no_proxy excludes the address."""
    proxies = urllib.request.getproxies()
    address = proxies.get("https") or proxies.get("all")
    if not address or urllib.request.proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(address if "//" in address else f"http://{address}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise OSError(
            f"The proxy in the environment variables is {proxy.scheme}://{proxy.hostname}. Use http://HOST:PORT."
        )
    return proxy._replace(netloc=proxy.netloc if proxy.port else f"{proxy.netloc}:80")


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    return str(error) or type(error).__name__


class RunMember(NamedTuple):
    """One node of one attempt of a run. `claim` is the secret with which the node joined."""

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


class HttpTransport:
    """A `BoardTransport` over HTTPS.

    Each batch has a number. The board takes each number once. `notify` gets one message each when the board becomes
    unreachable, responds again, or rejects a report.
    """

    def __init__(self, client: BoardClient, member: RunMember, notify: Callable[[str], None] = log.warning) -> None:
        self.client, self._member, self._notify = client, member, notify
        self._number = 0  # of the next batch
        self._retry_at = 0.0  # monotonic
        self._num_failures = 0
        self._is_unreachable = self._ended = self._refused = False
        self._answered, self._cancel = 0.0, False  # when the board last responded (monotonic), and its cancel flag

    @property
    def ended(self) -> bool:
        """Return whether the board accepts no more messages of this run."""
        return self._ended

    async def publish(self, batch: bytes) -> None:
        await self._send(f"{self._member.path}/batches?n={self._number}", batch, {})
        self._number += 1

    async def send_report(self, report: AttemptReport) -> None:
        body = zlib.compress(encode_report(report))
        await self._send(f"{self._member.path}/report", body, {"Content-Encoding": "deflate"})

    async def is_cancelled(self) -> bool:
        """Return the cancel flag of the last response. Reports and batches are frequent enough."""
        if not self._ended and time.monotonic() - self._answered > MAX_ANSWER_AGE_S:
            raise TransportError("the board did not answer recently")
        return self._cancel

    async def is_save_requested(self) -> bool:
        """Return False, because another engine schedules the run, and requests the save there."""
        return False

    async def get_loan_address(self, host: str) -> None:
        """Return None, because all nodes of an allocation share their files."""

    async def get_requested_steps(self) -> frozenset[int]:
        """Return no steps, because the board's responses do not contain requests."""
        return frozenset()

    async def renew_stream(self) -> None:
        """Do nothing, because the board renews the stream with each batch."""

    async def get_time(self) -> float:
        with _check_answer():
            return float((await self._meet({}))["now"])

    async def announce_ready(self, node: int, ready: ReadyMember) -> None:
        """Publish that this node is ready. The board knows its number from the token."""
        await self._meet(ready._asdict())

    async def get_ready_members(self) -> dict[int, ReadyMember]:
        with _check_answer():
            members = (await self._meet({}))["ready"]
            return {int(one["node"]): ReadyMember(str(one["address"]), int(one["port"])) for one in members}

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)

    async def _meet(self, message: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        return await self._send(f"{self._member.path}/meet", json.dumps(message).encode(), headers)

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """Send a request, and return the board's response. Raises MessageRefusedError, TransportError."""
        if self._ended:
            raise MessageRefusedError("the run has ended on the board")
        wait_s = self._retry_at - time.monotonic()
        if wait_s > 0:
            raise TransportError(f"next retry in {wait_s:.1f} s")
        try:
            answer = await asyncio.to_thread(self.client.post, path, body, {**self._member.headers, **headers})
        except NoAnswerError as error:
            self._delay_retry(None)
            self._notify_unreachable(
                f"The board does not answer ({error}). Training continues, and reports are buffered."
            )
            raise TransportError(str(error)) from None
        self._process_answer(answer)
        return answer.body

    def _process_answer(self, answer: BoardAnswer) -> None:
        """Update the state from a response. Raises TransportError."""
        if answer.status == 200 and not isinstance(answer.body.get("cancel"), bool):
            answer = BoardAnswer(502, {}, None)  # for example the page of a proxy
        if answer.status == 429 or answer.status >= 500:
            self._delay_retry(answer.retry_after_s)
            if answer.status != 429:
                self._notify_unreachable(
                    f"The board returned an error ({answer.problem}). Training continues, and reports are buffered."
                )
            raise TransportError(answer.problem)
        self._num_failures = 0
        if answer.status in (200, STATUS_RUN_ENDED):
            self._answered, self._cancel = time.monotonic(), answer.body.get("cancel") is True
        if answer.status == 200:
            if self._is_unreachable:
                self._is_unreachable = False
                self._notify("The board answers again.")
            return
        self._ended = answer.status in (401, 403, 404, STATUS_RUN_ENDED) and answer.field != "message"
        if self._ended:
            self._notify(f"The board accepts no more reports of this run ({answer.problem}). Training continues.")
        elif not self._refused:
            self._notify(f"The board refused a report ({answer.problem}). The report is dropped.")
            self._refused = True
        raise MessageRefusedError(answer.problem)

    def _delay_retry(self, retry_after_s: float | None) -> None:
        """Set the time of the next try, as the board asks, or with exponential backoff and jitter."""
        backoff_s = min(MAX_RETRY_INTERVAL_S, MIN_RETRY_INTERVAL_S * 2 ** min(self._num_failures, 10))
        self._num_failures += 1
        interval_s = backoff_s if retry_after_s is None else retry_after_s
        self._retry_at = time.monotonic() + interval_s * random.uniform(1.0, 1.5)

    def _notify_unreachable(self, message: str) -> None:
        if not self._is_unreachable:
            self._notify(message)
        self._is_unreachable = True


@contextmanager
def _check_answer() -> Iterator[None]:
    """Raise TransportError if a response lacks a field."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise TransportError(f"the board sent an invalid answer: {error!r}") from None
