"""What ranks counted of their memory beside the plan."""

from __future__ import annotations

from typing import Any

from planner.cost.memory import get_gradient_bytes, get_memory
from planner.facts.layout import get_coordinates
from planner.facts.spec import JobSpec

COUNTED = ("parameters", "gradients", "optimizer")


def wrong_memory(spec: JobSpec, items: list[list[dict[str, Any]]]) -> int:
    """Bytes that a stage's fullest rank counted, off the plan's: a shard that is cut shorter has smaller moments."""
    counted = [item["memory"] for told in items for item in told if item["kind"] == "verdict"]
    wrong = 0
    for stage in range(spec.layout.pp):
        plan = {**get_memory(spec, stage), "gradients": get_gradient_bytes(spec, stage)}
        mine = [parts for rank, parts in enumerate(counted) if get_coordinates(rank, spec.layout).pp == stage]
        wrong += sum(abs(max(parts[name] for parts in mine) - plan[name]) for name in COUNTED)
    return wrong
