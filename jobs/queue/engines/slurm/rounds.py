"""One round of talk at a time, in a thread: Slurm and the way to it may hang, the controller may not."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jobs.queue.engines.slurm.talk import News


class Rounds:
    """At most one is under way. A thread that is left behind holds nothing of ours and ends by its deadlines."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._news: News | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], News]) -> None:
        """Start a round; there is none under way."""
        assert not self.busy

        def run() -> None:
            try:
                self._news = work()
            except Exception as error:  # for the controller's own log, which tells of it once a minute
                self._error = error

        self._thread = threading.Thread(target=run, name="slurm", daemon=True)
        self._thread.start()

    def news(self, patience_s: float = 0.0) -> News | None:
        """What a round brought, once; None while it goes on. Raises what ended it."""
        if self._thread is not None:
            self._thread.join(patience_s)
        if self.busy:
            return None
        news, error, self._news, self._error = self._news, self._error, None, None
        if error is not None:
            raise error
        return news
