"""What can go wrong between a client and its board."""

from __future__ import annotations


class AwayError(Exception):
    """The board cannot be reached, or is no board."""


class TimedOutError(Exception):
    """A job did not end in the time that was given to it."""


class RefusedError(Exception):
    """The board refused; `problems` are (field, message)."""

    def __init__(self, status: int, problems: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{field}: {message}" for field, message in problems) or f"HTTP {status}")
        self.status, self.problems = status, problems
