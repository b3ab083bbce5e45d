"""Markdown of what JSON schemas and docstrings say."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

LIMITS = {
    "minimum": "from {}",
    "maximum": "to {}",
    "exclusiveMinimum": "above {}",
    "exclusiveMaximum": "below {}",
    "minLength": "{} characters or more",
    "maxLength": "at most {} characters",
    "minItems": "{} or more",
    "maxItems": "at most {}",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold Markdown of one line."""
    lines = ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "&#124;")


def code(text: object) -> str:
    """As typed: no Markdown within, and of `|` none that ends a cell."""
    return f"<code>{html.escape(str(text)).replace('|', '&#124;')}</code>" if str(text) else ""


def plain(text: str) -> str:
    """Words in which `<` and `*` are themselves; `code` stays code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", html.escape(p, quote=False)) for p in parts]
    return "".join(escaped)


def kind(schema: dict[str, Any]) -> str:
    """Type and limits of a JSON schema, in words; a shape of its own is a link to its heading."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{anchor(name)})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(kind(part) for part in schema[key]))
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    limits = [words.format(_number(schema[key])) for key, words in LIMITS.items() if key in schema]
    found = schema.get("type", "any")
    if isinstance(found, list):
        found = " or ".join(found)
    if found == "array":
        found = f"list of {kind(schema.get('items', {}))}"
    elif isinstance(schema.get("additionalProperties"), dict):
        found = f"object of {kind(schema['additionalProperties'])}"
    return ", ".join([found, *limits])


def anchor(heading: str) -> str:
    """Of a heading, what a link says."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def default(schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    if "default" not in schema:
        return ""
    told = schema["default"]
    return "" if told is None or isinstance(told, dict) else code(json.dumps(told))


def shape(schema: dict[str, Any]) -> str:
    """The fields of an object."""
    required = set(schema.get("required", ()))
    rows = [
        [code(name), kind(field), default(field, required=name in required), plain(field.get("description", ""))]
        for name, field in schema.get("properties", {}).items()
    ]
    return table(["field", "type", "default", "meaning"], rows)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
