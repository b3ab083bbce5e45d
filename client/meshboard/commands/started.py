"""Runs that are started here."""

from __future__ import annotations

import os
import shutil

import typer
from typer.core import TyperCommand

from meshboard import access, files
from meshboard.commands.app import app, warn_of


class AsTheyStand(TyperCommand):
    """Hands on its arguments untouched, `--` and `--help` too: they are another program's."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.args = list(args)
        return ctx.args


@app.command(cls=AsTheyStand, add_help_option=False)
def meter(context: typer.Context) -> None:
    """Report a run launched here: `meshboard meter -- torchrun ...` hands over to meshboard-meter, which hosts have."""
    program = shutil.which("meshboard-meter")
    if program is None:
        raise files.FileError("meshboard-meter is not here: it comes with a host's packages (docs/howto/elsewhere.md)")
    found = access.find()
    warn_of(found)
    environment = {**os.environ, "MESHBOARD_URL": found.url, "MESHBOARD_TOKEN": found.token}
    os.execve(program, [program, *context.args], environment)  # noqa: S606
