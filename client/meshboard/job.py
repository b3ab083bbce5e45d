"""Job as the board returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshboard.answers import JobDetail, Summary


@dataclass(frozen=True)
class Job:
    """Job with the full response of the board in `detail`.

    `already_existed` is true if a submit with the same key created the job before.
    """

    detail: JobDetail
    already_existed: bool = False

    @property
    def id(self) -> str:
        return self.detail["id"]

    @property
    def name(self) -> str:
        return self.detail["name"]

    @property
    def status(self) -> str:
        return self.detail["status"]

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1."""
        return self.detail["attempt"]

    @property
    def finished(self) -> bool:
        return self.detail["finished"]

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"

    @property
    def reason(self) -> str:
        """Reason for the state, or reason for which a queued job waits."""
        history = self.detail.get("history") or []
        return str(self.detail.get("wait_reason") or (history[-1]["reason"] if history else ""))

    @property
    def steps(self) -> int | None:
        """Number of training steps in the spec, or None if Meshboard's trainer does not run the job."""
        spec = self.detail.get("spec") or {}
        steps = (spec.get("train") or {}).get("steps")
        return steps if isinstance(steps, int) and spec.get("kind", "train") == "train" else None

    @property
    def world_size(self) -> int:
        return self.detail["world_size"]

    @property
    def verdict(self) -> str:
        """Verdict of the diagnosis with its reason and next step, or "" before the verdict."""
        diagnosis = self.detail.get("diagnosis") or {}
        if self.finished and not diagnosis.get("over"):
            return ""
        parts = (diagnosis.get("sentence"), diagnosis.get("reason"), diagnosis.get("next"))
        return " ".join(part for part in parts if part)

    @property
    def summary(self) -> Summary | dict[str, Any]:
        """Measurements of the ranks after the end of the job, else {}."""
        return (self.detail.get("exit") or {}).get("summary") or {}
