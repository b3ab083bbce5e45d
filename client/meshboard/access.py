"""Which board, and with which token: from the environment, else from a file that only its owner reads."""

from __future__ import annotations

import json
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpx

from meshboard.errors import WrongError, why

SPACE = re.compile(r"\s")
TOKEN = re.compile(r"[!-~]{1,4096}")


class Access(NamedTuple):
    """A board's address and a REST token for it."""

    url: str
    token: str


class NoAccessError(Exception):
    """Nobody said which board, or with which token."""


def address(url: str, told_by: str = "url") -> str:
    """A board's address. `told_by`: what it was given as.

    Raises:
        WrongError: it is none, or has a password in it, which logs and process lists would show; does not quote it.
    """
    url = url.strip().rstrip("/")
    told = _split(url)
    if told is None:
        raise WrongError(f"{told_by}: Use an address that begins with https:// or http:// and names a host.", told_by)
    if told.username is not None or told.query or told.fragment:
        words = "Use an address without a user name, password, query (?), and fragment (#)."
        raise WrongError(f"{told_by}: {words}", told_by)
    return url


def _split(url: str) -> SplitResult | None:
    """None for what nothing could be sent to."""
    try:
        told, host = urlsplit(url), httpx.URL(url).host
        host.encode("idna")
        known = told.scheme in ("http", "https") and bool(told.hostname) and told.port != 0 and not SPACE.search(url)
    except (ValueError, httpx.InvalidURL):
        return None
    return told if known else None


def token(text: str) -> str:
    """What a header can carry; a line's end around it does no harm.

    Raises:
        WrongError: it is none, in words that do not quote it.
    """
    text = text.strip()
    if not TOKEN.fullmatch(text):
        raise WrongError("The REST token is invalid. A token has only visible ASCII characters and no spaces.", "token")
    return text


def kept() -> Path:
    """The file that `meshboard login` writes."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "meshboard" / "login.json"


def find() -> Access:
    """MESHBOARD_URL and MESHBOARD_TOKEN, either of which stands in for what was kept.

    Raises:
        NoAccessError: with what to do.
        WrongError: what was told is no address, or no token.
    """
    told, given = _read(kept()), os.environ.get("MESHBOARD_URL")
    url = (given or told.get("url", "")).strip().rstrip("/")
    if url:
        address(url, "MESHBOARD_URL" if given else str(kept()))
    secret = os.environ.get("MESHBOARD_TOKEN") or (told.get("token", "") if url == told.get("url", "") else "")
    if not url or not secret:
        missing = "MESHBOARD_URL" if not url else "MESHBOARD_TOKEN"
        raise NoAccessError(
            f"The address or the token of the board is missing. Run 'meshboard login URL', or set {missing}."
        )
    return Access(url, token(secret))


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
        raise NoAccessError(f"Cannot store the login in {file}: {why(error)}") from None
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
        raise NoAccessError(f"Cannot read {file}: {why(error)}. Run 'meshboard login URL' again.") from None
    return {name: str(value) for name, value in told.items()} if isinstance(told, dict) else {}
