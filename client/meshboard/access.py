"""Which board, and with which token: from the environment, else from a file that only its owner reads."""

from __future__ import annotations

import json
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from meshboard.errors import why

TOKEN = re.compile(r"[!-~]{1,4096}")


class Access(NamedTuple):
    """A board's address and a REST token for it."""

    url: str
    token: str


class NoAccessError(Exception):
    """Nobody said which board, or with which token."""


def address(url: str) -> str:
    """A board's address.

    Raises:
        NoAccessError: it is none, or has a password in it, which logs and process lists would show.
    """
    url = url.strip().rstrip("/")
    try:
        told = urlsplit(url)
        known = told.scheme in ("http", "https") and bool(told.hostname)
    except ValueError:
        known = False
    if not known:
        raise NoAccessError("a board's address begins with https:// (or http://) and names its host")
    if told.username is not None or told.query or told.fragment:
        raise NoAccessError("a board's address has no user, password, ? or # in it: a token is kept apart")
    return url


def token(text: str) -> str:
    """What a header can carry; a line's end around it does no harm.

    Raises:
        NoAccessError: it is none, in words that do not quote it.
    """
    text = text.strip()
    if not TOKEN.fullmatch(text):
        raise NoAccessError("this is no token: one word of visible ASCII characters")
    return text


def kept() -> Path:
    """The file that `meshboard login` writes."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "meshboard" / "login.json"


def find() -> Access:
    """MESHBOARD_URL and MESHBOARD_TOKEN, either of which stands in for what was kept.

    Raises:
        NoAccessError: with what to do.
    """
    told = _read(kept())
    url = (os.environ.get("MESHBOARD_URL") or told.get("url", "")).strip().rstrip("/")
    secret = os.environ.get("MESHBOARD_TOKEN") or (told.get("token", "") if url == told.get("url", "") else "")
    if not url or not secret:
        missing = "MESHBOARD_URL" if not url else "MESHBOARD_TOKEN"
        raise NoAccessError(f"no board: run 'meshboard login URL', or set {missing}")
    return Access(address(url), token(secret))


def is_readable_on_the_way(url: str) -> bool:
    """Whether whoever carries what is sent there can read the token."""
    told = urlsplit(url)
    if told.scheme == "https" or told.hostname == "localhost":
        return False
    try:
        return not ip_address(told.hostname or "").is_loopback
    except ValueError:
        return True


def keep(access: Access) -> Path:
    """For the next commands; mode 0600.

    Raises:
        NoAccessError: it cannot be written.
    """
    file = kept()
    try:
        _write(file, access)
    except OSError as error:
        raise NoAccessError(f"the login cannot be kept: {file}: {why(error)}") from None
    return file


def _write(file: Path, access: Access) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(access._asdict(), out)
    new.replace(file)


def forget() -> bool:
    """Whether anything was kept."""
    known = kept().exists()
    kept().unlink(missing_ok=True)
    return known


def _read(file: Path) -> dict[str, str]:
    try:
        told = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise NoAccessError(f"{file} cannot be read: {why(error)}; run 'meshboard login URL' again") from None
    return {name: str(value) for name, value in told.items()} if isinstance(told, dict) else {}
