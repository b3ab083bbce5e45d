"""What the controller asks of an engine. Kubernetes, say, would be one more."""

from __future__ import annotations

from typing import Protocol


class Engine(Protocol):
    """Runs the jobs that name it. Each call is one pass over all of them and short: what takes time goes on beside the
    controller. What a pass finds half done, by a controller that was killed anywhere, it goes on with; an attempt is
    started once however often it is called.
    """

    name: str  # `Job.engine`

    def observe(self) -> None:
        """Hold what runs against what should: the news goes into the database."""

    def place(self) -> None:
        """Begin attempts of queued jobs, or write down why they wait."""

    def start(self) -> None:
        """Hand over what was placed."""

    def cancel(self) -> None:
        """Have what is to end told so."""

    def close(self) -> None:
        """The controller stops; what runs goes on."""
