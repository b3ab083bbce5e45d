"""Forgets what nobody needs any more, as controller and recorder do by themselves (docs/reference/bounds.md)."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from django.core.management.base import BaseCommand

from jobs.connection import connect
from jobs.history.kept.forgetting import forget_old
from jobs.queue.control.prune import prune


class Command(BaseCommand):
    """Prints how many of each went."""

    help = __doc__

    def handle(self, *_args: Any, **_options: Any) -> None:
        with closing(connect()) as client:
            for what, count in {**prune(client), **forget_old()}.items():
                self.stdout.write(f"{count:8,} {what}")
