"""What all commands share: the program, the words of their options, and the board that they speak to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from meshboard import access, exits
from meshboard.api import Client

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=f"Plan, submit, follow and gate training runs on a board.\n\nExit codes: {exits.words()}.",
)
AsJson = Annotated[bool, typer.Option("--json", help="the whole answer as JSON on standard output")]
Spec = Annotated[str, typer.Argument(metavar="SPEC", help="YAML or JSON file of a spec; - reads standard input")]
Sets = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="change a field, such as layout.dp=2")]
Cluster = Annotated[str | None, typer.Option(help="hardware to plan for, by its name on the board")]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="wait no longer than this")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="the job's id")]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="ids of jobs")]


@contextmanager
def board() -> Iterator[Client]:
    """Raises access.NoAccessError."""
    found = access.find()
    with Client(found.url, found.token, verify=os.environ.get("MESHBOARD_CA") or True) as client:
        yield client


def print_json(told: Any) -> None:
    print(json.dumps(told, indent=2))
