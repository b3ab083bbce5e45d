"""Types of settings. Errors are messages, and never show a password."""

from __future__ import annotations

import os
import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import dj_database_url
from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode

DATABASE_FORM = (
    "expected postgres://user:password@host:port/name (with options such as ?sslmode=require), or sqlite:////path. "
    "Percent-encode special characters of the password"
)
REDIS_FORM = "expected redis://user:password@host:port/0, or rediss:// for TLS, with a percent-encoded password"
SOCKET_FORM = "or unix:///path for a socket file"
HOST_FORM = (
    "expected a host name without https://, port, or path, such as board.example. "
    "Use .board.example to include subdomains"
)


def parse_database(url: SecretStr) -> dict[str, Any]:
    """Return Django's settings for a database URL. The query has options of the driver."""
    text = url.get_secret_value()
    try:
        known = text.startswith(("postgres://", "postgresql://", "sqlite:///"))
        found: dict[str, Any] = dict(dj_database_url.parse(text, conn_health_checks=True)) if known else {}
    except ValueError:
        found = {}
    if not found.get("NAME"):
        raise ValueError(DATABASE_FORM)  # the message of the parser can contain the password
    if found["ENGINE"] == "django.db.backends.sqlite3":
        # IMMEDIATE takes the write lock at once, so two writers queue instead of failing.
        found["OPTIONS"] = {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        }
    return found


def check_pattern(pattern: str, words: str) -> AfterValidator:
    """Return a validator of text. `words` is the error message."""

    def validate(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(words)
        return text

    return AfterValidator(validate)


def parse_pairs(text: str) -> dict[str, str]:
    """Parse `name=value` pairs, separated by commas. Raises ValueError."""
    pairs = [part.partition("=") for part in text.split(",")]
    found = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if not all(sign and re.fullmatch(r"[!#-'*+.^-`|~0-9A-Za-z-]+", name.strip()) for name, sign, _ in pairs):
        raise ValueError("expected name=value pairs, separated by commas, with percent-encoded values")
    return found


def _parsed(url: SecretStr) -> SecretStr:
    parse_database(url)
    return url


def _pairs(text: SecretStr) -> SecretStr:
    parse_pairs(text.get_secret_value())
    return text


def _token(text: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]{16,}", text.get_secret_value()):
        raise ValueError("expected 16 or more ASCII characters without spaces")
    return text


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _hosts(text: str) -> list[str]:
    """Parse host names. `webapp.checks` rejects "*"."""
    parts = _split(text)
    for part in parts or [""]:
        if part != "*" and not re.fullmatch(r"\.?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]", part):
            raise ValueError(HOST_FORM)
    return parts


def _networks(text: str) -> list[str]:
    """Parse networks. A network of all addresses would let every client choose its address."""
    parts = _split(text)
    for part in parts:
        if ip_network(part).prefixlen == 0:
            raise ValueError(f"{part} includes every address")
    return parts


def _ports(text: str) -> list[int]:
    """Parse ports from 1 to 65535."""
    parts = _split(text)
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,5}", part) or not 1 <= int(part) <= 65535:
            raise ValueError(f"{part} is not a port from 1 to 65535")
    return [int(part) for part in parts]


def _redis(url: SecretStr) -> SecretStr:
    if not _is_redis(url) and not url.get_secret_value().startswith("unix:///"):
        raise ValueError(f"{REDIS_FORM}, {SOCKET_FORM}")
    return url


def _hosts_redis(url: SecretStr) -> SecretStr:
    """Check a Redis URL that hosts use, which cannot be a socket."""
    if not _is_redis(url):
        raise ValueError(REDIS_FORM)
    return url


def _is_redis(url: SecretStr) -> bool:
    """Return whether a URL is valid. The Redis client ignores a wrong scheme or database number."""
    try:
        parts: SplitResult = urlsplit(url.get_secret_value())
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return (
        parts.scheme in ("redis", "rediss")
        and named
        and not parts.fragment
        and bool(re.fullmatch(r"/?\d*", parts.path))
    )


def _not_a_file(folder: Path) -> Path:
    if os.path.exists(folder) and not os.path.isdir(folder):  # Path.exists raises without permission
        raise ValueError("the path is not a folder")
    return folder


def _at(path: Path) -> Path:
    """Expand `~`, because no shell reads the settings of a systemd unit or a container."""
    return path.expanduser().resolve()


SSH_LOGIN = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}"  # no option of ssh
LOOPBACK = r"http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?(/|$)"
DatabaseUrl = Annotated[SecretStr, AfterValidator(_parsed)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis)]
HostsRedis = Annotated[SecretStr, AfterValidator(_hosts_redis)]
Headers = Annotated[SecretStr, AfterValidator(_pairs)]
Hosts = Annotated[list[str], NoDecode, BeforeValidator(_hosts)]
SecretNames = Annotated[
    list[SecretStr], NoDecode, BeforeValidator(lambda text: [SecretStr(key) for key in _split(text)])
]
Networks = Annotated[list[str], NoDecode, BeforeValidator(_networks)]
Ports = Annotated[list[int], NoDecode, BeforeValidator(_ports)]
Place = Annotated[Path, AfterValidator(_at)]
Folder = Annotated[Place, AfterValidator(_not_a_file)]
Url = Annotated[
    str, check_pattern(r"https?://[^\s?#@/]+[^\s?#@]*", "expected https://HOST, with an optional port and path")
]
HttpsUrl = Annotated[
    str,
    check_pattern(
        rf"(https://[^\s?#@/]|{LOOPBACK})[^\s?#@]*",
        "expected https://HOST, or http://localhost for this machine only",
    ),
]
Collector = Annotated[str, check_pattern(r"https?://[^\s?#]+", "expected http://HOST:PORT or https://HOST:PORT")]
MailServer = Annotated[
    str,
    check_pattern(
        r"[A-Za-z0-9.-]{1,253}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*",
        "expected a host name without port (see MESHBOARD_EMAIL_PORT)",
    ),
]
MailAddress = Annotated[str, check_pattern(r"[^\s<>@,;:]+@[A-Za-z0-9.-]+", "expected a mail address such as name@host")]
MetricsToken = Annotated[SecretStr, AfterValidator(_token)]
