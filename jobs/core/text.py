"""Parse and check text from requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

MAX_JSON_DEPTH = 32  # a spec has a depth of five
MAX_INTEGER_DIGITS = 4300  # the parse time of an integer is quadratic


def parse_whole_number(text: str, least: int, most: int) -> int | None:
    """Return the number in ASCII digits without a sign or leading zeros, None if invalid or out of range.

    `str.isdigit` accepts "²". `int` accepts digits of other scripts and rejects more than 4,300 digits.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(most)):
        return None
    if len(text) > 1 and text.startswith("0"):
        return None
    number = int(text)
    return number if least <= number <= most else None


def format_number_problem(name: str, value: str, least: int, most: int) -> str:
    """Return the message for a parameter that is not a whole number in its range."""
    return f"`{name}` is {value[:60]!r}. Use a whole number from {least} to {most}."


def format_choice_problem(name: str, value: str, choices: Iterable[str]) -> str:
    """Return the message for a parameter that is not one of its choices."""
    return f"`{name}` is {value[:60]!r}. Use one of {', '.join(choices)}."


def format_unknown_problem(name: str, known: Iterable[str]) -> str:
    """Return the message for a parameter that the address does not have."""
    names = ", ".join(known)
    advice = f"Use one of {names}." if names else "This URL accepts no parameters."
    return f"`{name[:100]}` is not a parameter of this URL. {advice}"


def format_repeated_problem(name: str) -> str:
    """Return the message for a parameter that a request has several times."""
    return f"`{name}` appears several times in the URL. Send this parameter once."


def is_storable(text: object) -> bool:
    """Return whether a database query can contain the text: PostgreSQL rejects NUL and lone surrogates."""
    return isinstance(text, str) and not any(c == "\x00" or "\ud800" <= c <= "\udfff" for c in text)


def parse_json(raw: bytes | str) -> Any:
    """Parse JSON, and reject deep nesting and repeated keys, which other parsers treat differently.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, repeats a key, or has an integer that is too long.
    """
    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    try:
        value = json.loads(text, object_pairs_hook=_parse_object, parse_int=_parse_integer)
    except RecursionError:
        raise ValueError("The JSON is nested too deeply.") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for parent in level for child in _get_children(parent)]
        if not level:
            return value
    raise ValueError(f"The JSON is nested deeper than {MAX_JSON_DEPTH} levels.")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"The key {json.dumps(repeated)[:100]} appears twice in one JSON object.")
    return value


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(
            f"An integer has {len(digits.lstrip('-')):,} digits, and the maximum is {MAX_INTEGER_DIGITS:,} digits."
        )
    return int(digits)


def _get_children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
