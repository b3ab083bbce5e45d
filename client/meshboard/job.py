"""A job as the board tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshboard.answers import JobDetail, Summary


@dataclass(frozen=True)
class Job:
    """`told` is all that the board says of it. `was_there`: of a submit whose key had made it before."""

    told: JobDetail
    was_there: bool = False

    @property
    def id(self) -> str:
        return self.told["id"]

    @property
    def name(self) -> str:
        return self.told["name"]

    @property
    def status(self) -> str:
        return self.told["status"]

    @property
    def attempt(self) -> int:
        """Which try it is at, from 1."""
        return self.told["attempt"]

    @property
    def finished(self) -> bool:
        return self.told["finished"]

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"

    @property
    def reason(self) -> str:
        """Why it is in its state, or why it waits."""
        history = self.told.get("history") or []
        return str(self.told.get("wait_reason") or (history[-1]["reason"] if history else ""))

    @property
    def steps(self) -> int | None:
        """How many it is to train; None where its spec names none, or those of a trainer that it does not start."""
        spec = self.told.get("spec") or {}
        steps = (spec.get("train") or {}).get("steps")
        return steps if isinstance(steps, int) and spec.get("kind", "train") == "train" else None

    @property
    def world_size(self) -> int:
        return self.told["world_size"]

    @property
    def verdict(self) -> str:
        """What the diagnosis says of it, and what to do; of what has ended its last word. "" until it says that."""
        told = self.told.get("diagnosis") or {}
        if self.finished and not told.get("over"):
            return ""
        return " ".join(part for part in (told.get("sentence"), told.get("reason"), told.get("next")) if part)

    @property
    def summary(self) -> Summary | dict[str, Any]:
        """What its ranks measured, once it has ended; else empty."""
        return (self.told.get("exit") or {}).get("summary") or {}
