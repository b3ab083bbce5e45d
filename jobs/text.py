"""Text that came from outside, read without surprises."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 32  # brackets of JSON inside each other; a spec has five


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that ASCII digits spell, without a sign or leading zeros; None where it is none from least to most.

    `str.isdigit` is true of "²", and `int` takes other scripts' digits and refuses thousands of them.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(most)):
        return None
    if len(text) > 1 and text.startswith("0"):
        return None
    number = int(text)
    return number if least <= number <= most else None


def storable(text: object) -> bool:
    """Whether a database can be asked for it: PostgreSQL refuses NUL, and no encoding has lone surrogates."""
    if not isinstance(text, str) or "\x00" in text:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


def parse_json(raw: bytes | str) -> Any:
    """JSON that whoever reads on can walk through: what nests deeper than DEEPEST makes some reader raise, some not.

    Raises:
        ValueError: no JSON, or too deep.
    """
    try:
        found = json.loads(raw.decode("utf-8") if isinstance(raw, bytes) else raw)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return found
    raise ValueError(f"nested deeper than {DEEPEST}")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
