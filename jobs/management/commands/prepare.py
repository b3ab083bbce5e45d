"""Prepare a board on one machine before its services start. Prints JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from django.core.checks import Tags
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS

from jobs.models import JoinToken
from jobs.queue.hosts.joining import has_joined

NOTE = "make up"


class Command(BaseCommand):
    """`make up` runs this command, which loads Django only once."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--keep", type=Path, help="JSON output of an earlier run, to keep the password and token of that run"
        )
        parser.add_argument("--host", type=Path, help="identity file (NAME.json) of the host on this machine")

    def handle(self, *_args: Any, **options: Any) -> None:
        self.check(tags=[Tags.database], databases=[DEFAULT_DB_ALIAS])
        call_command("migrate", verbosity=0)
        call_command("collectstatic", interactive=False, verbosity=0)
        login = _run_json_command("meshboard_user", keep=options["keep"])
        JoinToken.objects.filter(note=NOTE, uses=0).delete()  # of an earlier start, whose host did not join
        self.stdout.write(json.dumps({"login": login, "join_token": _make_join_token(options["host"])}))


def _make_join_token(identity_path: Path | None) -> str:
    """Return a join token, empty if the host has joined and needs none."""
    if identity_path is not None and has_joined(identity_path.stem, _identity(identity_path)):
        return ""
    return str(_run_json_command("join_token", json=True, hours=1, uses=1, note=NOTE)["token"])


def _identity(identity_path: Path) -> str:
    try:
        return str(json.loads(identity_path.read_text())["identity"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _run_json_command(command: str, **options: Any) -> dict[str, Any]:
    out = io.StringIO()
    call_command(command, stdout=out, **options)
    result: dict[str, Any] = json.loads(out.getvalue())
    return result
