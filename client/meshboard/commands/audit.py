"""Who did what on a board."""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Annotated, Final

import typer

from meshboard.api import LARGEST_PAGE
from meshboard.commands.app import AsJson, app, board, print_json
from meshboard.errors import WrongError
from meshboard.show.words import table

COLUMNS: Final = ("id", "at", "who", "address", "what", "kind", "name", "before", "after")
USUAL = 20


@app.command()
def audit(
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"maximum number of entries to show; default {USUAL}")
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
    with board() as client:
        if as_csv:
            for text in client.audit_csv(after=after):
                sys.stdout.write(text)
            return
        wanted = limit or USUAL
        found = list(islice(client.audit(after=after, limit=min(wanted, LARGEST_PAGE)), wanted))
    print_json(found) if as_json else print(table(COLUMNS, [[_cell(row[name]) for name in COLUMNS] for row in found]))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
