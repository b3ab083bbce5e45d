"""Which board, and with which token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshboard import access, files
from meshboard.commands.app import AsJson, app, opened, print_json
from meshboard.errors import why

NOT_HERE = (
    "a token is not given on the command line, where everybody on this machine can read it: it is asked for, or read"
    " from --token-file FILE, or from standard input with --token-file -"
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def login(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="the board's address, such as https://board.example")],
    token_file: Annotated[
        Path | None, typer.Option(help="read the token from a file, - from standard input, instead of asking")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep a board's address and a REST token for the next commands, in a file that only you can read."""
    if context.args:
        raise files.FileError(NOT_HERE)
    wanted = access.Access(access.address(url, "URL"), access.token(_token(token_file)))
    with opened(wanted) as client:
        next(client.jobs(limit=1), None)
    kept = access.keep(wanted)
    print(f"logged in; kept in {kept}", file=sys.stderr)
    if as_json:
        print_json({"url": wanted.url, "kept": str(kept)})


@app.command()
def logout(as_json: AsJson = False) -> None:
    """Forget what `login` kept."""
    forgotten = access.forget()
    print("forgotten" if forgotten else "nothing was kept", file=sys.stderr)
    if as_json:
        print_json({"forgotten": forgotten})


def _token(file: Path | None) -> str:
    if file is None:
        return str(typer.prompt("REST token", hide_input=True, err=True))
    try:
        return files.read(str(file)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise files.FileError(f"--token-file {file}: {why(error)}") from None
