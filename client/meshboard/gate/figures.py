"""Figures as text, with their units."""

from __future__ import annotations

DIGITS = 7  # of what is no whole number; more are those of a division
IN_FULL = 1e5  # from here on six digits would be told as 1.60665e+08


def figure(value: float | None, unit: str, sign: str = "") -> str:
    """Whole bytes and calls in full, since a gate is about the last of them. `sign`: "+" shows that of a change."""
    if value is None:
        return "-"
    if unit in ("B", ""):
        digits = _counted(value, sign)
    else:
        digits = f"{value:{sign},.1f}" if abs(value) >= IN_FULL else f"{value:{sign},.6g}"
    return f"{digits} {unit}".rstrip()


def _counted(value: float, sign: str) -> str:
    if abs(value) >= 10 ** (DIGITS - 1) or float(value).is_integer():
        return f"{value:{sign},.0f}"  # a mean's fraction of a byte is nothing that was sent
    return f"{value:{sign},.{DIGITS}g}"
