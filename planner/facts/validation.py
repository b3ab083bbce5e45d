"""Provide strict models, field types, and error texts for specs and requests."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from math import isqrt
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

JOB_ID_PATTERN = r"^[a-z0-9-]{1,16}$"
WORD_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._=-]*$"
JobId = Annotated[str, Field(pattern=JOB_ID_PATTERN)]
Word = Annotated[str, Field(min_length=1, max_length=63, pattern=WORD_PATTERN)]
NO_NUL = r"^[^\x00]*$"  # Databases and file names do not accept NUL.


class StrictModel(BaseModel):
    """Base model that is frozen, does not convert types, and rejects unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


MAX_CHOICES = 6  # Values that an error message suggests.


def format_count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun, such as '1 slot' or '2 slots'.

    Args:
        many: The plural, if it is not `one` with an s.
    """
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"


def format_alternatives(values: Iterable[object]) -> str:
    """Format values as '1, 2 or 4'."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def format_nearest(values: Iterable[int], value: int) -> str:
    """Format the values that are closest to a value in order, or return an empty text."""
    closest = sorted(sorted(values, key=lambda one: (abs(one - value), one))[:MAX_CHOICES])
    return format_alternatives(closest) if closest else ""


@lru_cache(maxsize=256)  # A search rejects thousands of layouts of one model.
def get_divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number in ascending order."""
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return tuple(dict.fromkeys([*small, *(number // one for one in reversed(small))]))


def format_nearest_multiples(step: int, value: int) -> str:
    """Format the positive multiples of a step next to a value, such as '6 or 12'."""
    below = value // step * step
    return format_alternatives(one for one in (below, below + step) if one)


class Problem(NamedTuple):
    """Error of a spec: the dotted field and a sentence for the user."""

    field: str
    message: str

    @property
    def sentence(self) -> str:
        """Return the message, with the field before it if the message does not name the field."""
        return self.message if f"`{self.field}" in self.message else f"`{self.field}`: {self.message}"


class SpecError(ValueError):
    """Error of a spec that cannot run. Holds every problem, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(" ".join(problem.sentence for problem in problems))
        self.problems = problems


UNPRINTABLE = ("Cc", "Zl", "Zp")  # Unicode categories of control characters and line breaks.


def find_path_problems(field: str, value: str | None, root: str, give: str = "a path below it") -> list[Problem]:
    """Return at most one problem of a path below a root directory of a host.

    Args:
        give: The kind of path that an error message suggests.
    """
    text = _explain_invalid_path(value, root, give) if value is not None else ""
    return [Problem(field, f"`{field}` is {value!r}, which {text}")] if text else []


def find_file_problems(field: str, value: str | None, root: str) -> list[Problem]:
    """Return at most one problem of a file path below a root directory of a host."""
    if found := find_path_problems(field, value, root):
        return found
    is_folder = value is not None and value.rpartition("/")[2] in ("", ".")
    return [Problem(field, f"`{field}` is {value!r}, which is a folder. Use a file in it.")] if is_folder else []


def _explain_invalid_path(value: str, root: str, give: str) -> str:
    if any(unicodedata.category(character) in UNPRINTABLE for character in value):
        return "contains a control character or a line break. Remove it."
    if value.startswith("/") or ".." in value.split("/"):
        return f"is outside the {root}. Use {give}, without '..'."
    return "starts with '-', like a command-line option. Use another name." if value.startswith("-") else ""
