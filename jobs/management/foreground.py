"""Base class of commands that run until TERM, and then end within 2 s."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connection

from jobs.queue.work_lease import explain_unhealthy

STOP_TIMEOUT_S = 1.5
HEALTH_INTERVAL_S = 10.0


def get_alive_file(name: str) -> Path:
    """Return the file whose age shows the health of a process. docker-compose.yml reads it."""
    return Path(settings.STATE_DIR) / "alive" / name


class Foreground(BaseCommand):
    """Command of which one process works at a time. A second process waits for the first to end."""

    name: str

    def make(self) -> Callable[[threading.Event], None]:
        """Return the function that runs in a thread until the event is set."""
        raise NotImplementedError

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--check",
            action="store_true",
            help=f"check the {self.name}: exit with 0 if its last complete tick is recent, otherwise with 1",
        )

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Also run the deployment checks, whose errors prevent the start."""
        super().check(*args, **{**kwargs, "include_deployment_checks": True})

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["check"]:
            self._check()
            return
        stop, ended = threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())

        # The thread lets the process end during a wait for the database or Redis.
        def work() -> None:
            try:
                self.make()(stop)
            finally:
                ended.set()

        worker = threading.Thread(target=work, name=self.name, daemon=True)
        worker.start()
        threading.Thread(target=self._show_health, args=(stop,), name="health", daemon=True).start()
        while not stop.is_set() and not ended.wait(0.1):
            pass
        if ended.wait(STOP_TIMEOUT_S) and stop.is_set():
            return
        # The worker hangs or failed. The next process repeats its unfinished work.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if stop.is_set() else 1)

    def _show_health(self, stop: threading.Event) -> None:
        """Touch a file while the process is healthy. A health check that starts Python would take seconds."""
        path = get_alive_file(self.name)
        while not stop.wait(HEALTH_INTERVAL_S):
            with contextlib.suppress(Error, OSError):
                if not explain_unhealthy(self.name):
                    path.parent.mkdir(exist_ok=True)
                    path.touch()
            connection.close()

    def _check(self) -> None:
        try:
            problem = explain_unhealthy(self.name)
        except Error as error:
            problem = f"The database does not answer: {error}"
        if problem:
            raise CommandError(problem)
