"""Addresses below /api/v1/, of their parts: all that is asked of a board goes through `path`."""

from __future__ import annotations

from urllib.parse import quote

from meshboard.errors import WrongError


def path(*parts: str) -> str:
    """Each part percent-encoded, whatever is in it.

    Raises:
        WrongError: a part that would make it the address of something else, encoded or not: clients, proxies and
            servers decode %2F, and go up where they read `..`.
    """
    return "/".join(map(_encoded, parts))


def _encoded(part: str) -> str:
    if part in ("", ".", "..") or "/" in part:
        raise WrongError(f"The name is {part!r}. A name cannot be empty, '.', or '..', and cannot contain '/'.")
    try:
        return quote(part, safe="")
    except UnicodeEncodeError:
        raise WrongError(f"The name is {part!r}. Use valid Unicode text.") from None
