"""Run the controller in the foreground: process events of hosts, place jobs, send orders, and delete old data."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.management.foreground import Foreground
from jobs.operations.controller import Controller
from jobs.queue.work_lease import CONTROLLER


class Command(Foreground):
    help = __doc__
    name = CONTROLLER

    def make(self) -> Callable[[threading.Event], None]:
        return Controller().run
