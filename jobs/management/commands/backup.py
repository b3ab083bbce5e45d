"""Back up this board to one file while jobs run: database, histories, and imports, without settings and secrets."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError

from jobs.operations.backup import BackupError, backup


class Command(BaseCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("target", type=Path, help="path of the new backup file, or an existing folder for the file")

    def handle(self, *_args: Any, **options: Any) -> None:
        target: Path = options["target"].absolute()
        if target.is_dir():
            target /= f"meshboard-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar"
        try:
            meta = backup(target)
        except (BackupError, DatabaseError, OSError) as error:
            raise CommandError(str(error)) from None
        size = target.stat().st_size
        rows = sum(meta["rows"].values())
        self.stdout.write(
            f"Wrote {target} with {rows:,} database rows, {meta['histories']:,} job histories, and {size:,} bytes"
        )
        self.stdout.write(
            "Store MESHBOARD_SECRET_KEY in another safe place. Without this key, all hosts need to join again."
        )
