"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """'1 slot', '2 slots'; `many` where that is not `one` with an s."""
    return f"1 {one}" if number == 1 else f"{number} {many or one + 's'}"
