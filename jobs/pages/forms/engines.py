"""The choice of the engine that runs a job."""

from __future__ import annotations

from typing import Any

WORDS = {"hosts": "Meshboard hosts", "slurm": "Slurm"}


def without_others(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of an engine that was not chosen, because the page sends them anyway."""
    resources = spec.get("resources", {})
    if resources.get("engine") != "slurm":
        resources.pop("slurm", None)
    return spec
