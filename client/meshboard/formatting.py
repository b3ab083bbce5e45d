"""Values and tables as plain text, for terminals and CI logs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
# Terminal escapes: CSI, then OSC and other strings up to their end, then two-byte escapes.
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b.?|\x9b[0-?]*[ -/]*[@-~]")


def format_bytes(num_bytes: float) -> str:
    """Return a size with a binary unit and three digits: "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while abs(value) >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {UNITS[unit]}" if abs(value) < 999.5 else f"{value:.0f} {UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Return a duration: "12.3 ms", "4.5 s", "1,200 s"."""
    if abs(seconds) < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.4g} s" if abs(seconds) < 1000 else f"{seconds:,.0f} s"


def remove_escapes(text: object) -> str:
    """Return text of other users without terminal escapes, with `?` for control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in ESCAPES.sub("", str(text)))


def format_log_line(text: str) -> str:
    """Return a log line without escapes, after its last carriage return. Tabs stay."""
    return "\t".join(remove_escapes(part) for part in text.rstrip("\r").rpartition("\r")[2].split("\t"))


def format_table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with aligned columns."""
    lines = [[remove_escapes(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def format_json(content: Any, indent: int | None = 2) -> str:
    """Return JSON with null for infinity and NaN, which JSON does not have."""
    return json.dumps(_replace_non_finite(content), indent=indent, allow_nan=False)


def _replace_non_finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: _replace_non_finite(value) for name, value in content.items()}
    return [_replace_non_finite(value) for value in content] if isinstance(content, (list, tuple)) else content
