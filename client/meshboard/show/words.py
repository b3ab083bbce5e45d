"""Figures, names and tables as plain text, alike for a terminal and for CI's log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# What a terminal would obey: CSI, then OSC and its like up to their end, then two-byte escapes.
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b.?|\x9b[0-?]*[ -/]*[@-~]")


def size(num_bytes: float) -> str:
    """Binary units, three digits."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {UNITS[unit]}" if abs(value) < 999.5 else f"{value:.0f} {UNITS[unit]}"


def seconds(value: float) -> str:
    if abs(value) < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.4g} s" if abs(value) < 1000 else f"{value:,.0f} s"


def clean(text: object) -> str:
    """Without what a terminal would obey: names, reasons and logs are other people's words."""
    return "".join(letter if letter.isprintable() else "?" for letter in ESCAPES.sub("", str(text)))


def line_of_log(text: str) -> str:
    """`clean`, with its tabs; of a line that went back to its start, what stood there last."""
    return "\t".join(clean(part) for part in text.rstrip("\r").rpartition("\r")[2].split("\t"))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Columns as wide as their widest cell."""
    lines = [[clean(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_json(told: Any, indent: int | None = 2) -> str:
    """What every reader of JSON takes: it has no infinity and no NaN."""
    return json.dumps(_finite(told), indent=indent, allow_nan=False)


def _finite(told: Any) -> Any:
    if isinstance(told, float):
        return told if math.isfinite(told) else None
    if isinstance(told, dict):
        return {name: _finite(value) for name, value in told.items()}
    return [_finite(value) for value in told] if isinstance(told, (list, tuple)) else told
