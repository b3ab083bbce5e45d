"""A command that works until it is told to end: TERM ends it within 2 s."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from jobs.queue.work_lease import explain_unhealthy

STOP_S = 1.5


class Foreground(BaseCommand):
    """One process of a name works at a time; a second one waits for the first to end."""

    name: str

    def make(self) -> Callable[[threading.Event], None]:
        """What runs until the event is set; called in its own thread."""
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--check",
            action="store_true",
            help=f"check the {self.name}: exit with 0 if its last complete tick is recent, otherwise with 1",
        )

    def check(self, *positional: Any, **named: Any) -> None:
        """Before `handle`: what `check --deploy` calls an error keeps it from starting."""
        super().check(*positional, **{**named, "include_deployment_checks": True})

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["check"]:
            self._check()
            return
        stop, ended = threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())

        # In a thread: no wait inside a database or Redis client holds up the end.
        def work() -> None:
            try:
                self.make()(stop)
            finally:
                ended.set()

        worker = threading.Thread(target=work, name=self.name, daemon=True)
        worker.start()
        while not stop.is_set() and not ended.wait(0.1):
            pass
        if ended.wait(STOP_S) and stop.is_set():
            return
        # Cut off in the middle, or its loop is broken: whatever it was at, the next one does it again.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if stop.is_set() else 1)

    def _check(self) -> None:
        try:
            problem = explain_unhealthy(self.name)
        except Error as error:
            problem = f"The database does not answer: {error}"
        if problem:
            raise CommandError(problem)
