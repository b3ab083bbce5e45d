"""The recorder, in the foreground: keeps what attempts send in columnar files, and forgets what is old."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.management.foreground import Foreground
from jobs.runs.history.recording.recorder import NAME, HistoryRecorder


class Command(Foreground):
    """One works at a time; a second one waits for the first to end."""

    help = __doc__
    name = NAME

    def make(self) -> Callable[[threading.Event], None]:
        return HistoryRecorder().run
