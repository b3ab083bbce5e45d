"""One kept connection to the board: HTTPS with the peer's name checked, through the proxy that the environment names.

Plain HTTP is spoken to loopback alone: a token goes with every request.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import ssl
import threading
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

TIMEOUT_S = 10.0
ANSWER_BYTES = 2**20


class BadUrlError(ValueError):
    """An address that the board cannot be spoken to at; says why."""


class AwayError(Exception):
    """No answer: whether the request was taken is not known."""


class Answer(NamedTuple):
    """Of the board. `told` is its JSON, {} where that is no object."""

    status: int
    told: dict[str, Any]
    retry_after_s: float | None

    @property
    def problem(self) -> str:
        """What a refusal says, in one line."""
        words = " ".join(str(self._error.get("message", ""))[:500].split()) or f"HTTP {self.status}"
        return words if self.field == "request" or self._error.get("in") == "path" else f"{self.field}: {words}"

    @property
    def field(self) -> str:
        """What a refusal is about: "request" for all of it."""
        return str(self._error.get("field", "request"))[:100]

    @property
    def _error(self) -> dict[str, Any]:
        errors = self.told.get("errors")
        first = errors[0] if isinstance(errors, list) and errors else None
        return first if isinstance(first, dict) else {}


class Board:
    """The board's web server at `url`. Safe to use from threads, one request at a time."""

    def __init__(self, url: str, ca_file: Path | None = None) -> None:
        """
        Raises:
            BadUrlError: `url` is none, or is plain HTTP to somewhere else than this machine.
            OSError: `ca_file` cannot be read; ssl.SSLError (an OSError) where it holds no certificate.
        """
        self._url = _checked(url)
        self._tls = ssl.create_default_context(cafile=ca_file) if self._url.scheme == "https" else None
        self._lock = threading.Lock()
        self._open: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """POST to a path below the board's API.

        A kept connection that the board has closed is opened again: whoever asks must not mind being heard twice.

        Raises:
            AwayError: saying why.
        """
        with self._lock:
            kept = self._open is not None
            try:
                return self._ask(path, body, headers)
            except (http.client.HTTPException, OSError) as error:
                self._hang_up()
                if not kept or isinstance(error, TimeoutError):
                    raise AwayError(_words(error)) from None
            try:
                return self._ask(path, body, headers)
            except (http.client.HTTPException, OSError) as error:
                self._hang_up()
                raise AwayError(_words(error)) from None

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _ask(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        if self._open is None:
            self._open = self._connect()
        self._open.request("POST", f"{self._url.path.rstrip('/')}/api/v1{path}", body, headers)
        response = self._open.getresponse()
        told = response.read(ANSWER_BYTES)
        if response.will_close or not response.isclosed():
            self._hang_up()
        return Answer(response.status, _object(told), _seconds(response.getheader("Retry-After")))

    def _connect(self) -> http.client.HTTPConnection:
        host, tls = self._url.hostname, self._tls
        assert host is not None, "the address was checked"
        if tls is None:
            return http.client.HTTPConnection(host, self._url.port, timeout=TIMEOUT_S)
        proxy = _proxy(self._url)
        if proxy is None:
            return http.client.HTTPSConnection(host, self._url.port, timeout=TIMEOUT_S, context=tls)
        connection = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, timeout=TIMEOUT_S, context=tls)
        connection.set_tunnel(host, self._url.port or 443, _proxy_headers(proxy))
        return connection

    def _hang_up(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.close()
        self._open = None


def _checked(url: str) -> SplitResult:
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
    if parts.scheme == "http" and not _is_loopback(host):
        raise BadUrlError(f"{url[:200]!r} would send the token unencrypted. Use https://, or http:// on loopback.")
    return parts


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy(url: SplitResult) -> SplitResult | None:
    """The proxy for HTTPS as https_proxy, all_proxy and no_proxy name it."""
    named = urllib.request.getproxies()
    told = named.get("https") or named.get("all")
    if not told or urllib.request.proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(told if "//" in told else f"http://{told}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise OSError(
            f"The proxy in the environment variables is {proxy.scheme}://{proxy.hostname}. Use http://HOST:PORT."
        )
    return proxy._replace(netloc=proxy.netloc if proxy.port else f"{proxy.netloc}:80")


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    who = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(who.encode()).decode()}"}


def _object(told: bytes) -> dict[str, Any]:
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _seconds(told: str | None) -> float | None:
    return float(told) if told and told.isascii() and told.isdigit() and len(told) < 6 else None


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    return str(error) or type(error).__name__
