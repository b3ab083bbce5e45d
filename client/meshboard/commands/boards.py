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
    "Remove the token from the command line, because other users of this machine can read it."
    " Enter the token when asked, or use --token-file FILE."
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def login(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="address of the board, such as https://board.example")],
    token_file: Annotated[Path | None, typer.Option(help="file with the REST token, or - for standard input")] = None,
    as_json: AsJson = False,
) -> None:
    """Store the address of a board and a REST token in a file that only you can read."""
    if context.args:
        raise files.FileError(NOT_HERE)
    wanted = access.Access(access.address(url, "URL"), access.token(_token(token_file)))
    with opened(wanted) as client:
        next(client.jobs(limit=1), None)
    kept = access.keep(wanted)
    print(f"Logged in. The login is stored in {kept}.", file=sys.stderr)
    if as_json:
        print_json({"url": wanted.url, "kept": str(kept)})


@app.command()
def logout(as_json: AsJson = False) -> None:
    """Remove the stored login."""
    forgotten = access.forget()
    print("Login removed." if forgotten else "No login is stored.", file=sys.stderr)
    if as_json:
        print_json({"forgotten": forgotten})


def _token(file: Path | None) -> str:
    if file is None:
        return str(typer.prompt("REST token", hide_input=True, err=True))
    try:
        return files.read(str(file)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise files.FileError(f"--token-file {file}: {why(error)}") from None
