"""Cells of a CSV file that can be read back, and that neither a terminal nor a spreadsheet carries out.

A list or map is JSON. Of text, a backslash and control characters are as JSON escapes them (`\\\\`, `\\u001b`), and
what begins with = + - @, which a spreadsheet would carry out, or with an apostrophe, has an apostrophe before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
CARRIED_OUT = "'=', '+', '-', '@', ''''"


def as_cells(sql: str, columns: Iterable[tuple[str, str]]) -> str:
    """SQL of the same rows, as cells. `columns`: each with its type, as DuckDB names it."""
    told = ", ".join(f"{_cell(name, kind)} AS {name}" for name, kind in columns)
    return f"SELECT {told} FROM ({sql})"


def _cell(name: str, kind: str) -> str:
    if kind.startswith("MAP"):  # of floats of 32 bits, which JSON would write with the digits of 64
        return f"to_json(CAST(CAST({name} AS MAP(VARCHAR, VARCHAR)) AS MAP(VARCHAR, DOUBLE)))"
    if kind.endswith("[]"):
        return _escaped(f"CAST(to_json({name}) AS VARCHAR)")
    if kind != "VARCHAR":
        return name
    text = _escaped(f"replace({name}, '\\', '\\\\')")
    return f"CASE WHEN {name}[1] IN ({CARRIED_OUT}) THEN '''' ELSE '' END || {text}"


def _escaped(text: str) -> str:
    escaped = reduce(lambda inner, code: f"replace({inner}, chr({code}), '\\u{code:04x}')", CONTROLS, text)
    return f"(CASE WHEN regexp_matches({text}, '[\\x00-\\x1f\\x7f-\\x{{9f}}]') THEN {escaped} ELSE {text} END)"
