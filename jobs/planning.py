"""The live answer of the submit page: estimate, problems and impossible choices of a draft."""

from __future__ import annotations

from typing import Any

from jobs.actions import largest_host_slots
from planner.choices import choices
from planner.estimate import estimate
from planner.layout import problems
from planner.models import parameter_count
from planner.parse import parse_fields
from planner.presets import PRESETS
from planner.spec import Problem, SpecError


def plan(data: object) -> dict[str, Any]:
    """{"estimate": or null, "problems": [...], "choices": {field: {option: reason}}}"""
    try:
        spec = parse_fields(data)
    except SpecError as error:
        return _answer(None, error.problems, {})
    slots = largest_host_slots(spec.resources.device)
    found = problems(spec, slots=slots)
    # More ranks than any host has slots can be costed all the same: that is what planning is for.
    costly = [p for p in found if p.field != "layout"]
    return _answer(None if costly else estimate(spec), found, choices(spec, slots=slots))


def _answer(estimated: Any, found: list[Problem], impossible: dict[str, dict[str, str]]) -> dict[str, Any]:
    shown = [{"field": p.field, "message": p.message} for p in found]
    return {"estimate": estimated, "problems": shown, "choices": impossible}


def presets() -> list[dict[str, Any]]:
    """Every preset with its exact parameter count."""
    return [
        {
            "name": name,
            "description": preset.description,
            "parameters": parameter_count(preset.model),
            "model": preset.model.model_dump(),
        }
        for name, preset in PRESETS.items()
    ]
