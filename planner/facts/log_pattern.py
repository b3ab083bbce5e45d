"""Check the regular expression that finds metrics in the log lines of a script."""

from __future__ import annotations

import math
import re
from typing import Any

MAX_PATTERN_CHARS = 500
MAX_PATTERN_GROUPS = 20
PATTERN_HINT = r"Use a pattern such as `step (?P<step>\d+) loss (?P<loss>\S+)`."
MAX_PATTERN_BYTES = 2**20  # memory of the compiled pattern
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,99}", re.IGNORECASE)
# Syntax of Python that RE2 lacks, because its time is not linear.
_UNSUPPORTED = re.compile(
    r"\\(?:\\|\[)|(?P<bad>\(\?(?:=|!|<=|<!|>|\(|P=)|\\[1-9]|(?:[*+?]|\{\d*,?\d*\})\+)|\\.", re.DOTALL
)


class LogPatternError(ValueError):
    """The regular expression is invalid. `position` counts characters from 1."""

    def __init__(self, text: str, position: int | None = None) -> None:
        super().__init__(text if position is None else f"{text} at character {position}")
        self.position = position


def check_log_pattern(pattern: str) -> str:
    """Return a valid pattern. Raises LogPatternError with the position of the problem."""
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise LogPatternError(error.msg, None if error.pos is None else error.pos + 1) from None
    except (RecursionError, OverflowError):
        raise LogPatternError("the pattern is nested too deeply") from None
    for found in _UNSUPPORTED.finditer(pattern):
        if found["bad"]:
            raise LogPatternError(f"{found['bad']} is not supported", found.start("bad") + 1)
    if not set(groups) - {"step"}:
        raise LogPatternError("the pattern has no named group for a metric, such as (?P<loss>[0-9.]+)")
    if len(groups) > MAX_PATTERN_GROUPS:
        raise LogPatternError(f"the pattern has {len(groups)} named groups, and the maximum is {MAX_PATTERN_GROUPS}")
    try:
        compile_log_pattern(pattern)
    except ImportError:
        return pattern  # the Python of a rank, which receives only checked patterns
    return pattern


def compile_log_pattern(pattern: str) -> Any:
    """Return the pattern for RE2. Raises LogPatternError."""
    import re2

    options = re2.Options()
    options.max_mem, options.log_errors = MAX_PATTERN_BYTES, False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        detail = error.args[0] if error.args else "unknown error"
        text = detail.decode(errors="replace") if isinstance(detail, bytes) else str(detail)
        fragment = text.rpartition(": ")[2]
        start = pattern.find(fragment) if fragment else -1
        raise LogPatternError(text[:200], start + 1 if start >= 0 else None) from None


def parse_number(text: str) -> float | None:
    """Return a printed number, for example "1,234.5", "1e-3" or "nan", or None."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if abs(number) <= 1e100 or not math.isfinite(number) else math.copysign(math.inf, number)
