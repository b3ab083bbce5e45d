"""Text that came from outside, read without surprises."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

DEEPEST = 32  # brackets of JSON inside each other; a spec has five
MOST_DIGITS = 4300  # of an integer; longer ones take Python a time that grows with their square


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


def number_problem(name: str, value: str, least: int, most: int) -> str:
    """Return the message for a parameter that is not a whole number in its range."""
    return f"`{name}` is {value[:60]!r}. Use a whole number from {least} to {most}."


def choice_problem(name: str, value: str, choices: Iterable[str]) -> str:
    """Return the message for a parameter that is not one of its choices."""
    return f"`{name}` is {value[:60]!r}. Use one of {', '.join(choices)}."


def unknown_problem(name: str, known: Iterable[str]) -> str:
    """Return the message for a parameter that the address does not have."""
    names = ", ".join(known)
    advice = f"Use one of {names}." if names else "This URL accepts no parameters."
    return f"`{name[:100]}` is not a parameter of this URL. {advice}"


def repeated_problem(name: str) -> str:
    """Return the message for a parameter that a request has several times."""
    return f"`{name}` appears several times in the URL. Send this parameter once."


def storable(text: object) -> bool:
    """Whether a database can be asked for it: PostgreSQL refuses NUL, and no encoding has lone surrogates."""
    if not isinstance(text, str) or "\x00" in text:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in text)


def parse_json(raw: bytes | str) -> Any:
    """JSON that whoever reads on can walk through: what nests deeper than DEEPEST makes some reader raise, some not;
    and that every reader understands alike: of a key that stands twice some take the first, some the last.

    Raises:
        ValueError: no JSON, too deep, a key twice, or a number longer than any that is meant.
    """
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError("The JSON is nested too deeply.") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return found
    raise ValueError(f"The JSON is nested deeper than {DEEPEST} levels.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"The key {json.dumps(twice)[:100]} appears twice in one JSON object.")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"An integer has {len(digits.lstrip('-')):,} digits, and the maximum is {MOST_DIGITS:,} digits."
        )
    return int(digits)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
