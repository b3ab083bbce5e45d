"""The choice of who runs a job, as forms and pages have it."""

from __future__ import annotations

from typing import Any

WORDS = {"hosts": "the board's hosts", "slurm": "Slurm"}


def without_others(spec: dict[str, Any]) -> dict[str, Any]:
    """A form's spec without what it sent for an engine that was not chosen: its fields are on the page all the same."""
    resources = spec.get("resources", {})
    if resources.get("engine") != "slurm":
        resources.pop("slurm", None)
    return spec
