"""What can go wrong between a client and its board."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def why(error: Exception) -> str:
    """What was wrong, of the system's errors without their number and the file, which whoever says so names."""
    return getattr(error, "strerror", None) or re.sub(r"^\[Errno -?\d+\] ", "", str(error))


class AwayError(Exception):
    """The board cannot be reached, or is no board."""


class TimedOutError(Exception):
    """A job did not end in the time that was given to it."""


class WrongError(Exception):
    """What was asked for makes no sense, and no board was asked; `field` names what, `pointer` where in a spec."""

    def __init__(self, message: str, field: str = "request", pointer: str = "") -> None:
        super().__init__(message)
        self.field, self.pointer = field, pointer


def line_of(field: str, message: str, name: str = "") -> str:
    """Return the message, with the name of its field before it if the message does not name the field."""
    return message if f"`{field}" in message else f"{name or field}: {message}"


class RefusedError(Exception):
    """The board refused; `problems` are (field, message), `document` all that it said (RFC 9457), where it said it.
    `about`: what stands in its words for some of the fields."""

    def __init__(
        self,
        status: int,
        problems: list[tuple[str, str]],
        document: dict[str, Any] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        lines = [line_of(field, message, (about or {}).get(field, field)) for field, message in problems]
        super().__init__("\n".join(lines) or f"HTTP {status}")
        self.status, self.problems, self.document = status, problems, document
