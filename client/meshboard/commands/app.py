"""Program, shared options, and connection of all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer

from meshboard.client import Client
from meshboard.commands.errors import list_exit_codes
from meshboard.credentials import Credentials, load_credentials, sends_token_in_clear
from meshboard.errors import WrongError, format_error
from meshboard.formatting import format_json


class Stdout:
    """State of standard output. With --json, a command prints one document or none."""

    has_document = False


stdout = Stdout()
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=f"Plan, submit, follow, and gate training runs on a board.\n\nExit codes: {list_exit_codes()}.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"meshboard {version('meshboard-client')}")
        raise typer.Exit


@app.callback()
def set_options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
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


def connect() -> AbstractContextManager[Client]:
    """Return a client of the board in the environment or in the stored login.

    Raises:
        NoCredentialsError, WrongError
    """
    return open_client(load_credentials())


@contextmanager
def open_client(credentials: Credentials) -> Iterator[Client]:
    """Yield a client. Raises WrongError if MESHBOARD_CA has no certificates."""
    warn_if_unencrypted(credentials)
    try:
        client = Client(credentials.url, credentials.token, verify=os.environ.get("MESHBOARD_CA") or True)
    except OSError as error:
        raise WrongError(f"MESHBOARD_CA: {format_error(error)}", "MESHBOARD_CA") from None
    with client:
        yield client


def warn_if_unencrypted(credentials: Credentials) -> None:
    """Print a warning if others on the network can read the token."""
    if sends_token_in_clear(credentials.url):
        print(
            f"meshboard: {credentials.url} does not use HTTPS. Others on the network can read the REST token.",
            file=sys.stderr,
        )


def print_json(content: Any) -> None:
    """Print a JSON document. After it, `main` prints none for an error."""
    stdout.has_document = True
    print(format_json(content))
