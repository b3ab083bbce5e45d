"""Which options of the form are possible given the rest, and the reason for each that is not."""

from __future__ import annotations

from typing import Any

from planner.facts.layout import SCHEDULE_NAMES, V_SCHEDULES, problems
from planner.facts.spec import JobSpec

DEGREES = (1, 2, 4, 8)

OPTIONS: dict[str, tuple[Any, ...]] = {
    "dp": DEGREES,
    "pp": DEGREES,
    "tp": DEGREES,
    "cp": DEGREES,
    "ep": DEGREES,
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "schedule": tuple(SCHEDULE_NAMES),
    "recompute": ("none", "selective", "full"),
}
CHUNKS = {"interleaved_1f1b": 2, "looped_bfs": 2, **dict.fromkeys(V_SCHEDULES, 2)}  # a stage, when a schedule is chosen


def choices(spec: JobSpec) -> dict[str, dict[str, str]]:
    """{field: {option: reason}} for every option of the layout that would bring a problem to a field that has none.

    The option already chosen is never listed: what is wrong with it stands among the problems. Nor is one that only
    lacks slots: it can be planned, and tried dry. Keys are text.
    """
    already = {p.field for p in problems(spec)}
    impossible: dict[str, dict[str, str]] = {}
    for field, options in OPTIONS.items():
        for option in options:
            if option == getattr(spec.layout, field):
                continue
            update = {field: option}
            if field == "schedule" and spec.layout.pp > 1:
                update["virtual_stages"] = CHUNKS.get(option, 1)
            changed = spec.model_copy(update={"layout": spec.layout.model_copy(update=update)})
            added = [p for p in problems(changed) if p.field not in already]
            if added:
                impossible.setdefault(field, {})[str(option).lower()] = " ".join(p.message for p in added)
    return impossible
