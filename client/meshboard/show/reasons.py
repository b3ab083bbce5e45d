"""Why a layout was chosen, and what another would have been faster by."""

from __future__ import annotations

from collections.abc import Mapping

from meshboard.answers import Advice, JobDetail, Option, Part, Plan
from meshboard.show import plans
from meshboard.show.words import clean, seconds, table


def chosen(told: Plan | JobDetail) -> str:
    """What took the place of a layout "auto", and why; "" where the spec named its own."""
    found = told.get("chosen")  # an older board tells none
    return clean(f"layout {found['words']} on {_ranks(found['ranks'])}: {found['why']}") if found else ""


def advised(told: Advice) -> str:
    """Return the advice, and for each option the part of the step with the largest gain."""
    parts = {part["part"]: part for part in told["parts"]}
    rows = [_because(option, parts) for option in (*told["options"], *told["unsure"]) if option.get("because")]
    if not rows:
        return plans.advice(told)
    head = ["change", "largest gain", "in this run", "with the change", "basis"]
    return "\n".join([plans.advice(told), "", table(head, rows)])


def _because(option: Option, parts: Mapping[str, Part]) -> list[object]:
    why = option["because"]
    known = _known(parts.get(why["part"]))
    return [option["change"], why["part"], seconds(why["apportioned_s"]), seconds(why["there_s"]), known]


def _known(part: Part | None) -> str:
    if part and (measured_s := part.get("measured_s")) is not None:
        return f"measured: {seconds(measured_s)}"
    if part and (at_most_s := part.get("measured_at_most_s")) is not None:
        return f"measured: {seconds(at_most_s)} at most"
    return "estimate, not measured"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"
