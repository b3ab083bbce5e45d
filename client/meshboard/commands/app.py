"""What all commands share: the program, the words of their options, and the board that they speak to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer

from meshboard import access, exits
from meshboard.api import Client
from meshboard.errors import WrongError, why
from meshboard.show import words


class Stdout:
    """Whether a command has said its JSON, which is one document or none."""

    has_document = False


stdout = Stdout()
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=f"Plan, submit, follow, and gate training runs on a board.\n\nExit codes: {exits.words()}.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"meshboard {version('meshboard-client')}")
        raise typer.Exit


@app.callback()
def options(
    _told: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="print the version and exit")
    ] = False,
) -> None:
    pass


AsJson = Annotated[bool, typer.Option("--json", help="print the complete response of the board as JSON")]
Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="YAML or JSON file with the job spec, or - for standard input")
]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="change a field of the spec, such as layout.dp=2")
]
Cluster = Annotated[str | None, typer.Option(help="name of a cluster on the board to plan for")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="stop waiting after this number of seconds")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="job id")]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="job ids")]


def board() -> AbstractContextManager[Client]:
    """Raises access.NoAccessError, WrongError."""
    return opened(access.find())


@contextmanager
def opened(found: access.Access) -> Iterator[Client]:
    """Raises WrongError: MESHBOARD_CA names no certificates."""
    warn_of(found)
    try:
        client = Client(found.url, found.token, verify=os.environ.get("MESHBOARD_CA") or True)
    except OSError as error:
        raise WrongError(f"MESHBOARD_CA: {why(error)}", "MESHBOARD_CA") from None
    with client:
        yield client


def warn_of(found: access.Access) -> None:
    """Says so where the token goes over the wire as it is, wherever the address was told."""
    if access.is_readable_on_the_way(found.url):
        print(
            f"meshboard: {found.url} does not use HTTPS. Others on the network can read the REST token.",
            file=sys.stderr,
        )


def print_json(told: Any) -> None:
    """One document; `commands.main` adds none of its own behind it."""
    stdout.has_document = True
    print(words.as_json(told))
