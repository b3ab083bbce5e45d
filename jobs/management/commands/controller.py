"""The controller, in the foreground: hears hosts, places jobs, sends orders, forgets what is old."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.management.foreground import Foreground
from jobs.operations.controller import Controller
from jobs.queue.work_lease import CONTROLLER


class Command(Foreground):
    """One works at a time; a second one waits for the first to end."""

    help = __doc__
    name = CONTROLLER

    def make(self) -> Callable[[threading.Event], None]:
        return Controller().run
