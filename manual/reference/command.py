"""Page of the `meshboard` command, from its typer application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from manual.reference.markdown import escape_markdown, format_code, format_table
from meshboard import commands

HEAD = "# Command line\n"


def build_page() -> str:
    """Return the Markdown of the page."""
    root = get_command()
    parts = [HEAD, escape_markdown(root.help or "") + "\n"]
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
