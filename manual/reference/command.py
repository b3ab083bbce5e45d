"""The `meshboard` command, from the typer application itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from manual.reference.words import code, plain, table
from meshboard import commands

HEAD = "# Command line\n"


def page() -> str:
    root = application()
    parts = [HEAD, plain(root.help or "") + "\n"]
    for name, command in every(root):
        arguments = [_called(one) for one in command.params if one.param_type_name == "argument"]
        usage = " ".join(["meshboard", name, "[OPTIONS]", *arguments])
        parts += [f"## meshboard {name}\n", plain(command.help or "") + "\n", f"```\n{usage}\n```\n"]
        parts.append(_parameters(command))
    return "\n".join(parts)


def application() -> Any:
    return typer.main.get_command(commands.app)


def every(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """(words, command) of each command below a group."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, TyperGroup):
            yield from every(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _parameters(command: Any) -> str:
    rows = []
    for one in command.params:
        told = "" if one.default is None or callable(one.default) or one.default in ((), [], False) else one.default
        shown = "required" if one.required else code(told)
        rows.append([code(_called(one)), shown, plain(one.help or "")])
    return table(["parameter", "default", "meaning"], rows)


def _called(one: Any) -> str:
    """As typed: an argument by its word, an option with the word of its value."""
    word = one.metavar or one.name.upper()
    if one.param_type_name == "argument":
        return word if one.nargs == 1 else f"{word.rstrip('.')}..."
    names = ", ".join([*one.opts, *one.secondary_opts])
    return names if one.is_flag else f"{names} {word}"
