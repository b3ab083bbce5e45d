"""Runs that are started here."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

import typer
from typer.core import TyperCommand

from meshboard import access, files
from meshboard.commands.app import app, warn_of

HELP = {"-h", "--help"}  # takes no board


class AsTheyStand(TyperCommand):
    """Hands on its arguments untouched, `--` and `--help` too: they are another program's."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.args = list(args)
        return ctx.args


@app.command(cls=AsTheyStand, add_help_option=False)
def meter(context: typer.Context) -> None:
    """Report a run that you launch here. Example: `meshboard meter -- torchrun ...`. Needs the worker packages."""
    program = _program()
    if program is None:
        words = "Install it with pip install 'meshboard[worker]'. See docs/howto/elsewhere.md."
        raise files.FileError(f"meshboard-meter is not installed. {words}")
    if HELP & set(itertools.takewhile(lambda word: word != "--", context.args)):
        os.execve(program, [program, *context.args], dict(os.environ))  # noqa: S606
    found = access.find()
    warn_of(found)
    environment = {**os.environ, "MESHBOARD_URL": found.url, "MESHBOARD_TOKEN": found.token}
    os.execve(program, [program, *context.args], environment)  # noqa: S606


def _program() -> str | None:
    """A virtual environment's commands lie beside each other, and need not be on the PATH."""
    beside = (Path(sys.executable).parent, Path(sys.argv[0]).absolute().parent)
    return shutil.which("meshboard-meter") or shutil.which("meshboard-meter", path=os.pathsep.join(map(str, beside)))
