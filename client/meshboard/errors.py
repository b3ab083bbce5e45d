"""Errors of the client, which the package exports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


class AwayError(Exception):
    """The board cannot be reached, or the server is not a board."""


class TimedOutError(Exception):
    """A job did not end within the timeout."""


class WrongError(Exception):
    """A request is invalid, and the client sent nothing to the board.

    Args:
        field: Name of the wrong argument or option.
        pointer: JSON pointer (RFC 6901) of the wrong field in a spec.
    """

    def __init__(self, message: str, field: str = "request", pointer: str = "") -> None:
        super().__init__(message)
        self.field, self.pointer = field, pointer


class RefusedError(Exception):
    """The board rejected the request.

    Args:
        problems: (field, message) of each problem.
        document: Problem document of the board (RFC 9457), if the response has one.
        labels: Names of fields in the text of this error.
    """

    def __init__(
        self,
        status: int,
        problems: list[tuple[str, str]],
        document: dict[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        lines = [format_problem(field, message, (labels or {}).get(field, field)) for field, message in problems]
        super().__init__("\n".join(lines) or f"HTTP {status}")
        self.status, self.problems, self.document = status, problems, document


def format_problem(field: str, message: str, label: str = "") -> str:
    """Return the message, with the name of its field in front if the message lacks it."""
    return message if f"`{field}" in message else f"{label or field}: {message}"


def format_error(error: Exception) -> str:
    """Return the text of an error, without the number and the file of an OSError."""
    return getattr(error, "strerror", None) or re.sub(r"^\[Errno -?\d+\] ", "", str(error))
