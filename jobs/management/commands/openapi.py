"""Write the OpenAPI document, unless it breaks version 1 of the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from jobs.api.compatibility import find_breaking_changes
from jobs.api.openapi import get_document

TARGET = Path(__file__).resolve().parents[3] / "docs" / "openapi.json"


class Command(BaseCommand):
    help = "Write docs/openapi.json. Fails if a change breaks version 1 of the API."

    def handle(self, *args: Any, **options: Any) -> None:
        made = get_document()
        if TARGET.exists() and (broken := find_breaking_changes(json.loads(TARGET.read_text()), made)):
            raise CommandError("\n".join(["These changes break version 1 of the API:", *broken]))
        TARGET.write_text(written(made))
        self.stdout.write(f"{TARGET.name}: {len(made['paths'])} paths")


def written(made: Any) -> str:
    """Return sorted JSON, so each difference is a change."""
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
