"""The id of a request: its answer has it, an error's page quotes it, and every line it leaves in the log names it."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = b"x-request-id"
GIVEN = re.compile(rb"[0-9a-f]{32}")  # as nginx makes them; nothing else that a stranger sends gets into a log

_current: ContextVar[str] = ContextVar("reference", default="")


def begin(given: bytes | None) -> str:
    """The id of the request that begins: the proxy's, or a new one."""
    made = given.decode() if given is not None and GIVEN.fullmatch(given) else secrets.token_hex(16)
    _current.set(made)
    return made


def current() -> str:
    """Of the request at hand, empty outside of any."""
    return _current.get()
