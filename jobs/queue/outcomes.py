"""What a host says a lab found, believed only when it makes sense."""

from __future__ import annotations

import json

from planner.lab import LabResult


def checked_result(told: object) -> LabResult | None:
    """A host's result, None for what is none."""
    try:
        return LabResult.model_validate_json(json.dumps(told))
    except (ValueError, TypeError):  # msgpack may bring what JSON has no word for
        return None


def failure(result: LabResult | None) -> str:
    """Why a lab that ended well has failed all the same; empty when it has not."""
    if result is None:
        return "the host sent no usable result"
    return f"{result.wrong} elements are wrong" if result.wrong else ""
