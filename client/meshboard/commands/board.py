"""Commands for the board itself: login, logout, audit, and meter."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.core import TyperCommand

from meshboard.client import MAX_PAGE_ROWS
from meshboard.commands.app import AsJson, app, connect, open_client, print_json, warn_if_unencrypted
from meshboard.credentials import (
    Credentials,
    delete_credentials,
    load_credentials,
    parse_board_url,
    parse_token,
    save_credentials,
)
from meshboard.errors import WrongError, format_error
from meshboard.formatting import format_table
from meshboard.spec_files import SpecFileError, read_file

EXTRA_ARGUMENTS = (
    "Remove the token from the command line, because other users of this machine can read it."
    " Enter the token when asked, or use --token-file FILE."
)
AUDIT_COLUMNS: Final = ("id", "at", "who", "address", "what", "kind", "name", "before", "after")
DEFAULT_AUDIT_ROWS = 20
HELP_OPTIONS = {"-h", "--help"}


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def login(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="address of the board, such as https://board.example")],
    token_file: Annotated[Path | None, typer.Option(help="file with the REST token, or - for standard input")] = None,
    as_json: AsJson = False,
) -> None:
    """Store the address of a board and a REST token in a file that only you can read."""
    if context.args:
        raise SpecFileError(EXTRA_ARGUMENTS)
    credentials = Credentials(parse_board_url(url, "URL"), parse_token(_read_token(token_file)))
    with open_client(credentials) as client:
        next(client.jobs(limit=1), None)
    file = save_credentials(credentials)
    print(f"Logged in. The login is stored in {file}.", file=sys.stderr)
    if as_json:
        print_json({"url": credentials.url, "kept": str(file)})


def _read_token(file: Path | None) -> str:
    if file is None:
        return str(typer.prompt("REST token", hide_input=True, err=True))
    try:
        return read_file(str(file)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecFileError(f"--token-file {file}: {format_error(error)}") from None


@app.command()
def logout(as_json: AsJson = False) -> None:
    """Remove the stored login."""
    deleted = delete_credentials()
    print("Login removed." if deleted else "No login is stored.", file=sys.stderr)
    if as_json:
        print_json({"forgotten": deleted})


@app.command()
def audit(
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"maximum number of entries to show; default {DEFAULT_AUDIT_ROWS}")
    ] = None,
    after: Annotated[
        int | None, typer.Option(metavar="ID", min=1, help="show only entries after the entry with this id")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="print all entries as CSV")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the audit log, newest first. Only for staff."""
    if as_csv and (as_json or limit is not None):
        raise WrongError(f"--csv prints all entries. Omit {'--json' if as_json else '--limit'}.", "--csv")
    with connect() as client:
        if as_csv:
            for text in client.audit_csv(after=after):
                sys.stdout.write(text)
            return
        count = limit or DEFAULT_AUDIT_ROWS
        entries = list(islice(client.audit(after=after, limit=min(count, MAX_PAGE_ROWS)), count))
    if as_json:
        print_json(entries)
    else:
        rows = [[_format_cell(entry[name]) for name in AUDIT_COLUMNS] for entry in entries]
        print(format_table(AUDIT_COLUMNS, rows))


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class PassThroughCommand(TyperCommand):
    """Command that passes all arguments to another program, `--` and `--help` too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        ctx.args = list(args)
        return ctx.args


@app.command(cls=PassThroughCommand, add_help_option=False)
def meter(context: typer.Context) -> None:
    """Report a run that you launch here. Example: `meshboard meter -- torchrun ...`. Needs the worker packages."""
    program = _find_meter()
    if program is None:
        words = "Install it with pip install 'meshboard[worker]'. See docs/howto/elsewhere.md."
        raise SpecFileError(f"meshboard-meter is not installed. {words}")
    environment = dict(os.environ)
    if not HELP_OPTIONS & set(itertools.takewhile(lambda word: word != "--", context.args)):
        credentials = load_credentials()
        warn_if_unencrypted(credentials)
        environment |= {"MESHBOARD_URL": credentials.url, "MESHBOARD_TOKEN": credentials.token}
    os.execve(program, [program, *context.args], environment)  # noqa: S606


def _find_meter() -> str | None:
    # The commands of a virtual environment are in one folder, which need not be on the PATH.
    folders = (Path(sys.executable).parent, Path(sys.argv[0]).absolute().parent)
    return shutil.which("meshboard-meter") or shutil.which("meshboard-meter", path=os.pathsep.join(map(str, folders)))
