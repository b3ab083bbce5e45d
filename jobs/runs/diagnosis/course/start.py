"""How long each stage of a run's start took, and who came last to its end."""

from __future__ import annotations

from typing import Literal

from contracts.telemetry.steps import StartItem
from jobs.core.verdict_schema import StartPart
from jobs.runs.diagnosis.run import Run

Name = Literal["queue", "claim", "spawn", "import", "rendezvous", "build", "first step"]
STAGES: tuple[tuple[str, Name], ...] = (
    ("claimed", "claim"),
    ("spawned", "spawn"),
    ("imported", "import"),
    ("met", "rendezvous"),
    ("built", "build"),
    ("first step", "first step"),
)


class Start:
    """When the last member was through each stage."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: dict[str, tuple[float, int]] = {}

    def add(self, item: StartItem) -> None:
        stage, reached = item["stage"], (item["time"], item["rank"])
        self._last[stage] = max(self._last.get(stage, reached), reached)

    def parts(self) -> list[StartPart]:
        """From its submit on. A stage that nobody told of is part of the next."""
        found: list[StartPart] = []
        before = self._run.submitted
        if before is not None and self._run.ordered is not None:
            found.append({"name": "queue", "seconds": max(0.0, self._run.ordered - before), "rank": -1})
        before = self._run.ordered if self._run.ordered is not None else before
        for stage, name in STAGES:
            if stage not in self._last:
                continue
            time, rank = self._last[stage]
            if before is not None:
                found.append({"name": name, "seconds": max(0.0, time - before), "rank": rank})
            before = max(before, time) if before is not None else time
        return found

    @property
    def reached(self) -> str:
        """The last stage that somebody told of, "" before any."""
        return next((stage for stage, _ in reversed(STAGES) if stage in self._last), "")
