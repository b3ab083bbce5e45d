"""Create a join token on the machine of the board."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from contracts.security import SecretError, read_secret_file
from jobs.planning.schemas import validate_request
from jobs.queue.hosts import joining
from planner.facts.validation import SpecError

VARIABLE = "MESHBOARD_JOIN_TOKEN"


def write_private_file(path: Path, text: str) -> None:
    """Write a file with mode 0600 by renaming a complete file. Raises CommandError."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)
        draft.replace(path)
    except OSError as error:
        raise CommandError(f"--file is {path}, which cannot be written: {error.strerror}") from None


class Command(BaseCommand):
    help = "Create a join token for new hosts. Then run python -m workers.host.join URL --token TOKEN on each new host."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--hours", type=int, default=24, help="number of hours until the token expires")
        parser.add_argument(
            "--uses",
            type=int,
            help="maximum number of hosts that can use the token (default: 1, or unlimited with --given)",
        )
        parser.add_argument(
            "--label",
            action="append",
            default=[],
            help="label for each host that joins with the token; pools select hosts by label",
        )
        parser.add_argument("--note", default="", help="purpose of the token")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--given",
            action="store_true",
            help=f"use the token from {VARIABLE} or {VARIABLE}_FILE instead of a new token",
        )

        parser.add_argument(
            "--file", type=Path, help="also write the token to this file, which only its owner can read"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        uses = options["uses"] or (None if options["given"] else 1)
        data = {"hours": options["hours"], "uses": uses, "labels": options["label"], "note": options["note"]}
        try:
            token_request = validate_request(joining.JoinTokenRequest, data)
            if options["given"]:
                text = read_secret_file(VARIABLE) or os.environ.get(VARIABLE, "")
                token = joining.store_token(text, "manage.py", token_request)
            else:
                token, text = joining.create_token("manage.py", token_request)
        except SpecError as error:
            raise CommandError(" ".join(problem.sentence for problem in error.problems)) from None
        except SecretError as error:
            raise CommandError(str(error)) from None
        if options["file"] is not None:
            write_private_file(options["file"], text)
        if options["json"]:
            self.stdout.write(json.dumps({"token": text, "expires": token.expires.isoformat()}))
        elif token.revoked is not None:
            why = f"{joining.explain_invalid_token(token)} Set a new token to add hosts. Hosts that have joined do not need a token."  # noqa: E501
            self.stdout.write(f"The token in {VARIABLE} is invalid. {why}")
        elif options["given"]:
            self.stdout.write(f"The token in {VARIABLE} is valid until {token.expires:%Y-%m-%d %H:%M:%S} UTC.")
        else:
            self.stdout.write(text)
