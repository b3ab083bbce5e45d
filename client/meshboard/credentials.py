"""Address of the board and REST token, from the environment or from the stored login."""

from __future__ import annotations

import json
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

import httpx

from meshboard.errors import WrongError, format_error

SPACE = re.compile(r"\s")
TOKEN = re.compile(r"[!-~]{1,4096}")


class Credentials(NamedTuple):
    """Address of a board and a REST token for it."""

    url: str
    token: str


class NoCredentialsError(Exception):
    """The address or the token of the board is missing."""


def parse_board_url(url: str, name: str = "url") -> str:
    """Return the address of a board without a trailing slash.

    Args:
        name: Name of the argument, option or variable with the address, for error messages.

    Raises:
        WrongError: The address is invalid or contains a password. The message does not quote it.
    """
    url = url.strip().rstrip("/")
    parts = _split_url(url)
    if parts is None:
        raise WrongError(f"{name}: Use an address that begins with https:// or http:// and names a host.", name)
    if parts.username is not None or parts.query or parts.fragment:
        words = "Use an address without a user name, password, query (?), and fragment (#)."
        raise WrongError(f"{name}: {words}", name)
    return url


def _split_url(url: str) -> SplitResult | None:
    """Return the parts of an HTTP address, or None if no request could be sent to it."""
    try:
        parts, host = urlsplit(url), httpx.URL(url).host
        host.encode("idna")
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return None
    return parts if is_http and not SPACE.search(url) else None


def parse_token(text: str) -> str:
    """Return a REST token without surrounding whitespace.

    Raises:
        WrongError: An HTTP header cannot contain the token. The message does not quote it.
    """
    text = text.strip()
    if not TOKEN.fullmatch(text):
        raise WrongError("The REST token is invalid. A token has only visible ASCII characters and no spaces.", "token")
    return text


def sends_token_in_clear(url: str) -> bool:
    """Return whether others on the network can read a token that is sent to this address."""
    parts = urlsplit(url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return False
    try:
        return not ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


def load_credentials() -> Credentials:
    """Return the credentials from MESHBOARD_URL and MESHBOARD_TOKEN, else from the stored login.

    Raises:
        NoCredentialsError: The address or the token is missing.
        WrongError: The address or the token is invalid.
    """
    stored, variable = _read_login(get_login_file()), os.environ.get("MESHBOARD_URL")
    url = (variable or stored.get("url", "")).strip().rstrip("/")
    if url:
        parse_board_url(url, "MESHBOARD_URL" if variable else str(get_login_file()))
    # The stored token is only for the stored address.
    token = os.environ.get("MESHBOARD_TOKEN") or (stored.get("token", "") if url == stored.get("url", "") else "")
    if not url or not token:
        missing = "MESHBOARD_URL" if not url else "MESHBOARD_TOKEN"
        raise NoCredentialsError(
            f"The address or the token of the board is missing. Run 'meshboard login URL', or set {missing}."
        )
    return Credentials(url, parse_token(token))


def get_login_file() -> Path:
    """Return the path of the file that `meshboard login` writes."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "meshboard" / "login.json"


def save_credentials(credentials: Credentials) -> Path:
    """Write the credentials to the login file with mode 0600, and return its path.

    Raises:
        NoCredentialsError: The file cannot be written.
    """
    file = get_login_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_suffix(".new")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(credentials._asdict(), out)
        draft.replace(file)
    except OSError as error:
        raise NoCredentialsError(f"Cannot store the login in {file}: {format_error(error)}") from None
    return file


def delete_credentials() -> bool:
    """Delete the login file, and return whether it existed."""
    existed = get_login_file().exists()
    get_login_file().unlink(missing_ok=True)
    return existed


def _read_login(file: Path) -> dict[str, str]:
    try:
        stored = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        words = f"{format_error(error)}. Run 'meshboard login URL' again."
        raise NoCredentialsError(f"Cannot read {file}: {words}") from None
    return {name: str(value) for name, value in stored.items()} if isinstance(stored, dict) else {}
