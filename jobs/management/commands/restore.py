"""Restore a backup to an empty board. Stop the web server, controller, and recorder first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from jobs.operations.backup import BackupError, restore


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source", type=Path)
        parser.add_argument(
            "--replace", action="store_true", help="replace an existing board and delete the data of that board"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        before = os.umask(0o077)  # a new database contains password hashes
        try:
            settings.STATE_DIR.mkdir(parents=True, exist_ok=True)
            meta, notes = restore(options["source"], replace=options["replace"])
        except (BackupError, DatabaseError, OSError) as error:
            raise CommandError(str(error)) from None
        finally:
            os.umask(before)
        rows = sum(meta["rows"].values())
        self.stdout.write(
            f"Restored {rows:,} database rows and {meta['histories']:,} job histories from {meta['made']}"
        )
        for note in notes:
            self.stdout.write(note)
