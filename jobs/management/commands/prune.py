"""Delete old data, which the controller and the recorder also do (docs/reference/bounds.md)."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import BaseCommand

from jobs.core.redis_client import connect
from jobs.operations.prune import prune
from jobs.runs.history.store.retention import delete_old_histories


class Command(BaseCommand):
    help = __doc__

    def handle(self, *_args: Any, **_options: Any) -> None:
        with closing(connect()) as client:
            for what, count in {**prune(client), **delete_old_histories()}.items():
                self.stdout.write(f"{count:8,} {what}")
