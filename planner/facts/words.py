"""Numbers in sentences."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import isqrt

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
