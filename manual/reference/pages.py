"""Pages of the job spec, the MESHBOARD_ variables, the `meshboard` command, and the collectives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic_settings import BaseSettings
from typer.core import TyperGroup

from jobs.runs.collectives.descriptions import EXAMPLE_BYTES, PRIMITIVES, CollectiveDescription
from manual.reference.markdown import describe_type, escape_markdown, format_code, format_fields, format_table
from meshboard import commands
from planner.facts.presets import PRESETS
from planner.facts.spec import JobSpec, Layout
from planner.search.auto_layout import AutoSpec
from webapp.environment import PREFIX, RunnerSettings, WebSettings
from webapp.installation import CHECKOUT

SPEC_HEAD = """# Job spec

A spec describes a job, in JSON or YAML. The form, the REST interface, the command, and the trainer all use it.
Meshboard refuses unknown fields.

A job needs `model` (all sizes, or a `preset` and the sizes that differ) unless it is a script or a lab. `layout` may be
`"auto"`, or `{"auto": {..}}` with constraints ([AutoSpec](#autospec)).
"""
SETTINGS_HEAD = """# Settings

This page lists the environment variables that web, controller, recorder, and `make up` read.
The variables of host workers and of Docker Compose are in [Host settings](host-settings.md).
An empty variable counts as not set.
If a variable is invalid, the process does not start, and the error message names the variable.
"""
TABLES: dict[str, type[BaseSettings]] = {"Web, controller, recorder": WebSettings, "make up": RunnerSettings}
COMMAND_HEAD = "# Command line\n"
COLLECTIVES_HEAD = f"""# Collectives

This page describes each collective with its PyTorch call, its cost, and its uses. The page **Collectives** of a board
[benchmarks](lab.md) them on your hosts. See [strategies](strategies.md) for the collectives of each axis.

The pictures show the tensors of four ranks before and after a call. Element i of rank r starts as 100 (r + 1) + i, so
each value shows its rank.

| symbol | meaning |
|---|---|
| n | ranks of the group |
| S | bytes of the full (gathered) buffer, {EXAMPLE_BYTES:,} in the tables |
| α | latency per message, in seconds |
| B | bandwidth of a link, in bytes per second |

Times are for a ring. Bytes are for a bandwidth-optimal algorithm.
"""  # noqa: RUF001 - mathematical signs


def build_spec_page() -> str:
    """Return the Markdown of the page."""
    schema = JobSpec.model_json_schema()
    auto = AutoSpec.model_json_schema()
    for name in AutoSpec.model_fields.keys() & Layout.model_fields.keys():  # an option has the meaning of the field
        auto["properties"][name].setdefault("description", Layout.model_fields[name].description)
    models: dict[str, Any] = {**schema.pop("$defs"), **auto.pop("$defs", {}), "AutoSpec": auto}
    parts = [SPEC_HEAD, "## JobSpec\n", escape_markdown(schema.get("description", "")) + "\n", format_fields(schema)]
    for name in sorted(models, key=lambda name: name == "AutoSpec"):
        model = models[name]
        body = format_fields(model) if "properties" in model else describe_type(model) + "\n"
        parts += [f"## {name}\n", escape_markdown(model.get("description", "")) + "\n", body]
    parts += ["## Presets\n", ", ".join(f"`{name}`" for name in PRESETS) + "\n"]
    return "\n".join(parts)


def build_settings_page() -> str:
    """Return the Markdown of the page."""
    parts = [SETTINGS_HEAD]
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


def build_command_page() -> str:
    """Return the Markdown of the page."""
    root = get_command()
    parts = [COMMAND_HEAD, escape_markdown(root.help or "") + "\n"]
    for name, command in list_commands(root):
        arguments = [_format_parameter(one) for one in command.params if one.param_type_name == "argument"]
        usage = " ".join(["meshboard", name, "[OPTIONS]", *arguments])
        parts += [f"## meshboard {name}\n", escape_markdown(command.help or "") + "\n", f"```\n{usage}\n```\n"]
        parts.append(_format_parameters(command))
    return "\n".join(parts)


def get_command() -> Any:
    return typer.main.get_command(commands.app)


def list_commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (words, command) for each command of a group."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, TyperGroup):
            yield from list_commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _format_parameters(command: Any) -> str:
    rows = []
    for one in command.params:
        has_default = one.default is not None and not callable(one.default) and one.default not in ((), [], False)
        shown = "required" if one.required else format_code(one.default if has_default else "")
        rows.append([format_code(_format_parameter(one)), shown, escape_markdown(one.help or "")])
    return format_table(["parameter", "default", "meaning"], rows)


def _format_parameter(one: Any) -> str:
    """Return a parameter as in the usage: ARGUMENT, or --option VALUE."""
    word = one.metavar or one.name.upper()
    if one.param_type_name == "argument":
        return word if one.nargs == 1 else f"{word.rstrip('.')}..."
    names = ", ".join([*one.opts, *one.secondary_opts])
    return names if one.is_flag else f"{names} {word}"


def build_collectives_page() -> str:
    """Return the Markdown of the page."""
    return "\n".join([COLLECTIVES_HEAD, *(_section(words) for words in PRIMITIVES)])


def _section(words: CollectiveDescription) -> str:
    parts = [f"## {words.title}\n", escape_markdown(words.meaning) + "\n"]
    parts.append(f"![{words.title}: tensors of four ranks before and after](../pictures/lab-{words.slug}.png)\n")
    parts.append(f"```python\n{words.call}\n```\n")
    rows = [["time", format_code(words.time)], ["bytes per rank", format_code(words.sent)]]
    rows += [[f"bytes per rank, {n} ranks", f"{sent:,}"] for n, sent in words.examples if words.name != "barrier"]
    parts.append(format_table(["quantity", "cost"], rows))
    parts += [f"- **{use.strategy}**: {escape_markdown(use.words)}" for use in words.uses]
    return "\n".join(parts) + "\n"
