"""Findings about the steps of a script. The meter counts the steps and the traffic, but does not time steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.telemetry.batches import Item
from jobs.runs.diagnosis.findings import Finding
from planner.facts.validation import format_count

COUNTED = "Meshboard counts the steps of a script, but does not time or predict them."


class Script:
    """Counts the optimizer steps of a script. Ignores runs of Meshboard's trainer."""

    def __init__(self, *, is_script: bool) -> None:
        self._is_script = is_script
        self._steps, self._has_sent = 0, False

    def add(self, item: Item) -> None:
        if item["kind"] == "phase":
            self._steps = max(self._steps, item.get("steps", 0))
        elif item["kind"] == "traffic":
            self._has_sent = self._has_sent or any(cell["count"] for cell in item["cells"])

    def ended(self, report: Mapping[str, Any] | None) -> None:
        """Take the number of steps from the summary of the exit report."""
        summary = (report or {}).get("summary") or {}
        self._steps = max(self._steps, summary.get("steps") or 0)

    def finding(self, outcome: str | None, why_cancelled: str) -> Finding | None:
        """Return the finding of a script, or None without any count. `why_cancelled`: a full sentence."""
        if not self._is_script or not (self._steps or self._has_sent):
            return None
        seen = format_count(self._steps, "optimizer step") if self._steps else "no optimizer step"
        if outcome is None:
            return Finding("well", 0.0, f"Not checked: the script has run {seen} so far.", COUNTED, "")
        if outcome == "cancelled":
            return Finding("starting", 0.0, f"Not checked: the script was cancelled after {seen}.", why_cancelled, "")
        return Finding("starting", 0.0, f"Not checked: the script ended after {seen}.", COUNTED, "")
