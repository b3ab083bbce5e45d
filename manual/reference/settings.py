"""The MESHBOARD_ variables of web, controller and `make up`, from the models that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from manual.reference.words import code, kind, plain, table
from webapp.environment import PREFIX, RunnerSettings, WebSettings
from webapp.places import CHECKOUT

HEAD = """# Settings

This page lists the environment variables that web, controller, recorder, and `make up` read.
The variables of host workers and of Docker Compose are in [Host settings](host-settings.md).
An empty variable counts as not set.
If a variable is invalid, the process does not start, and the error message names the variable.
"""
TABLES: dict[str, type[BaseSettings]] = {"Web, controller, recorder": WebSettings, "make up": RunnerSettings}


def page() -> str:
    parts = [HEAD]
    for title, model in TABLES.items():
        parts += [f"## {title}\n", _table(model)]
    return "\n".join(parts)


def _table(model: type[BaseSettings]) -> str:
    told = model.model_json_schema(mode="validation")["properties"]
    rows = [
        [
            code(f"{PREFIX}{name.upper()}"),
            kind(told[name]),
            "required" if field.is_required() else _shown(field.default),
            plain(field.description or ""),
        ]
        for name, field in model.model_fields.items()
    ]
    return table(["variable", "type", "default", "meaning"], rows)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Path):
        return code(value.relative_to(CHECKOUT)) if value.is_relative_to(CHECKOUT) else ""
    return code(",".join(map(str, value)) if isinstance(value, list) else value)
