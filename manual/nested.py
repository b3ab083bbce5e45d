"""Indentation of blocks in list items, as Python-Markdown needs it.

GitHub accepts fenced code and tables at the indentation of the item's text. Python-Markdown requires four spaces per
level, blank lines around tables, and indented code instead of fences.
"""

from __future__ import annotations

import re

LEVEL = 4  # spaces
FENCE = re.compile(r"( *)(`{3,})(.*)")
ITEM = re.compile(r"(?:\d+\.|[-*]) ")


def indent_nested_blocks(markdown: str) -> str:
    """Return the text with blocks in list items indented for Python-Markdown."""
    result: list[str] = []
    fence: tuple[int, str] | None = None  # indentation and ticks of the open fence
    has_block = False  # whether the current list item has a block besides its first paragraph
    for line in markdown.split("\n"):
        match = FENCE.fullmatch(line)
        indent = len(line) - len(line.lstrip(" "))
        if fence is not None:
            outer, ticks = fence
            closes = match is not None and match[2] == ticks and indent == outer and not match[3].strip()
            result.append(line if not outer else "" if closes else _code_line(line, outer))
            fence = None if closes else fence
        elif match is not None:
            fence = indent, match[2]
            result.append("" if indent else line)
            has_block = indent > 0
        elif not indent:
            if has_block and ITEM.match(line):
                result.append("")
            has_block = has_block and not line
            result.append(line)
        else:
            text = line[indent:]
            previous = result[-1].lstrip(" ") if result else ""
            is_table = text.startswith("|")
            has_block = has_block or not previous or is_table
            if previous and has_block and (is_table != previous.startswith("|") or _starts_list(previous, text)):
                result.append("")
            result.append(" " * (_levels(indent) * LEVEL) + text)
    return "\n".join(result)


def _code_line(line: str, indent: int) -> str:
    return " " * (_levels(indent) * LEVEL + LEVEL) + line[indent:] if line.strip() else ""


def _starts_list(previous: str, text: str) -> bool:
    return bool(ITEM.match(text)) and not ITEM.match(previous)


def _levels(indent: int) -> int:
    return -(-indent // LEVEL)
