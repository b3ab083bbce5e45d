"""What specs and requests are made of: a model that takes nothing it does not know, and texts that are safe to keep.

Numbers in sentences.

Texts of a spec that become paths below a root of a host's, or arguments of what runs there.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from math import isqrt
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

JOB_ID = r"^[a-z0-9-]{1,16}$"
WORD = r"^[A-Za-z0-9][A-Za-z0-9._=-]*$"
JobId = Annotated[str, Field(pattern=JOB_ID)]
Word = Annotated[str, Field(min_length=1, max_length=63, pattern=WORD)]
NO_NUL = r"^[^\x00]*$"  # no database and no file name takes it


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


MAX_CHOICES = 6  # values that an error message offers


def counted(number: int, one: str, many: str = "") -> str:
    """'1 slot', '2 slots'; `many` where that is not `one` with an s."""
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"


def alternatives(values: Iterable[object]) -> str:
    """Return '1, 2 or 4'."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(values: Iterable[int], value: int) -> str:
    """Return the values that are closest to a value, in order: '1, 2 or 4'. Empty if there are none."""
    closest = sorted(sorted(values, key=lambda one: (abs(one - value), one))[:MAX_CHOICES])
    return alternatives(closest) if closest else ""


@lru_cache(maxsize=256)  # a search refuses thousands of layouts of one model
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a positive number, in order."""
    small = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return tuple(dict.fromkeys([*small, *(number // one for one in reversed(small))]))


def nearest_multiples(step: int, value: int) -> str:
    """Return the positive multiples of a step next to a value: '6 or 12'."""
    below = value // step * step
    return alternatives(one for one in (below, below + step) if one)


class Problem(NamedTuple):
    """One error of a spec: the dotted field that it belongs to, and a sentence for the user."""

    field: str
    message: str

    @property
    def sentence(self) -> str:
        """Return the message, with the field before it if the message does not name the field."""
        return self.message if f"`{self.field}" in self.message else f"`{self.field}`: {self.message}"


class SpecError(ValueError):
    """A spec that cannot run. Carries every problem, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(" ".join(problem.sentence for problem in problems))
        self.problems = problems


UNPRINTABLE = ("Cc", "Zl", "Zp")  # control characters and ends of lines, by Unicode's categories


def path_problems(field: str, value: str | None, root: str, give: str = "a path below it") -> list[Problem]:
    """Of a file or a folder below a root; at most one."""
    text = _why_no_path(value, root, give) if value is not None else ""
    return [Problem(field, f"`{field}` is {value!r}, which {text}")] if text else []


def file_problems(field: str, value: str | None, root: str) -> list[Problem]:
    """Of a file below a root; at most one."""
    if found := path_problems(field, value, root):
        return found
    is_folder = value is not None and value.rpartition("/")[2] in ("", ".")
    return [Problem(field, f"`{field}` is {value!r}, which is a folder. Use a file in it.")] if is_folder else []


def _why_no_path(value: str, root: str, give: str) -> str:
    if any(unicodedata.category(character) in UNPRINTABLE for character in value):
        return "contains a control character or a line break. Remove it."
    if value.startswith("/") or ".." in value.split("/"):
        return f"is outside the {root}. Use {give}, without '..'."
    return "starts with '-', like a command-line option. Use another name." if value.startswith("-") else ""
