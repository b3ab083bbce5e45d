"""Texts of a spec that become paths below a root of a host's, or arguments of what runs there."""

from __future__ import annotations

import unicodedata

from planner.facts.spec import Problem

UNPRINTABLE = ("Cc", "Zl", "Zp")  # control characters and ends of lines, by Unicode's categories


def path_problems(field: str, value: str | None, root: str, give: str = "a path below it") -> list[Problem]:
    """Of a file or a folder below a root; at most one."""
    text = _why_no_path(value, root, give) if value is not None else ""
    return [Problem(field, f"`{field}` is {value!r}, which {text}")] if text else []


def file_problems(field: str, value: str | None, root: str) -> list[Problem]:
    """Of a file below a root; at most one."""
    if found := path_problems(field, value, root):
        return found
    is_folder = value is not None and value.rpartition("/")[2] in ("", ".")
    return [Problem(field, f"`{field}` is {value!r}, which is a folder. Use a file in it.")] if is_folder else []


def _why_no_path(value: str, root: str, give: str) -> str:
    if any(unicodedata.category(character) in UNPRINTABLE for character in value):
        return "contains a control character or a line break. Remove it."
    if value.startswith("/") or ".." in value.split("/"):
        return f"is outside the {root}. Use {give}, without '..'."
    return "starts with '-', like a command-line option. Use another name." if value.startswith("-") else ""
