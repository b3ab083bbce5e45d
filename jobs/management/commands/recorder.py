"""Run the recorder in the foreground: store the telemetry of attempts in columnar files, and delete old data."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.management.foreground import Foreground
from jobs.runs.history.recording.recorder import NAME, HistoryRecorder


class Command(Foreground):
    help = __doc__
    name = NAME

    def make(self) -> Callable[[threading.Event], None]:
        return HistoryRecorder().run
