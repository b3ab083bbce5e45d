"""Page of the MESHBOARD_ variables, from the models that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from manual.reference.markdown import describe_type, escape_markdown, format_code, format_table
from webapp.environment import PREFIX, RunnerSettings, WebSettings
from webapp.installation import CHECKOUT

HEAD = """# Settings

This page lists the environment variables that web, controller, recorder, and `make up` read.
The variables of host workers and of Docker Compose are in [Host settings](host-settings.md).
An empty variable counts as not set.
If a variable is invalid, the process does not start, and the error message names the variable.
"""
TABLES: dict[str, type[BaseSettings]] = {"Web, controller, recorder": WebSettings, "make up": RunnerSettings}


def build_page() -> str:
    """Return the Markdown of the page."""
    parts = [HEAD]
    for title, model in TABLES.items():
        parts += [f"## {title}\n", _table(model)]
    return "\n".join(parts)


def _table(model: type[BaseSettings]) -> str:
    schema = model.model_json_schema(mode="validation")["properties"]
    rows = [
        [
            format_code(f"{PREFIX}{name.upper()}"),
            describe_type(schema[name]),
            "required" if field.is_required() else _format_default(field.default),
            escape_markdown(field.description or ""),
        ]
        for name, field in model.model_fields.items()
    ]
    return format_table(["variable", "type", "default", "meaning"], rows)


def _format_default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Path):
        return format_code(value.relative_to(CHECKOUT)) if value.is_relative_to(CHECKOUT) else ""
    return format_code(",".join(map(str, value)) if isinstance(value, list) else value)
