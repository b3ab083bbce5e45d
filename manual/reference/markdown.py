"""Markdown from JSON schemas and docstrings."""

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


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells can contain Markdown of one line."""
    lines = ["| " + " | ".join(escape_cell(text) for text in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) + "\n"


def escape_cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "&#124;")


def format_code(text: object) -> str:
    """Return text as HTML code, without Markdown and without `|`, which would end a table cell."""
    return f"<code>{html.escape(str(text)).replace('|', '&#124;')}</code>" if str(text) else ""


def escape_markdown(text: str) -> str:
    """Return text with escaped HTML and Markdown, except `code`."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", html.escape(p, quote=False)) for p in parts]
    return "".join(escaped)


def describe_type(schema: dict[str, Any]) -> str:
    """Return the type and the limits of a JSON schema. A named schema is a link to its heading."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{get_anchor(name)})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(describe_type(part) for part in schema[key]))
    if "const" in schema:
        return format_code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(format_code(value) for value in schema["enum"])
    limits = [words.format(_number(schema[key])) for key, words in LIMITS.items() if key in schema]
    found = schema.get("type", "any")
    if isinstance(found, list):
        found = " or ".join(found)
    if found == "array":
        found = f"list of {describe_type(schema.get('items', {}))}"
    elif isinstance(schema.get("additionalProperties"), dict):
        found = f"object of {describe_type(schema['additionalProperties'])}"
    return ", ".join([found, *limits])


def get_anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def format_default(schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return "required"
    if "default" not in schema:
        return ""
    value = schema["default"]
    return "" if value is None or isinstance(value, dict) else format_code(json.dumps(value))


def format_fields(schema: dict[str, Any]) -> str:
    """Return a table of the fields of an object."""
    required = set(schema.get("required", ()))
    rows = [
        [
            format_code(name),
            describe_type(field),
            format_default(field, required=name in required),
            escape_markdown(field.get("description", "")),
        ]
        for name, field in schema.get("properties", {}).items()
    ]
    return format_table(["field", "type", "default", "meaning"], rows)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
