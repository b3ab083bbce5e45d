"""The lab's form: flat text fields to a spec and back. Meaning is checked by `planner.spec` alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jobs.models import Host
from planner.lab import ITEM_BYTES
from planner.spec import LabSpec, Problem

_NUMBERS = ("min_bytes", "max_bytes", "factor", "iterations", "warmup")
_CHOICES = ("dtype", "reduce_op")
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
OPTIONS = {
    "lab.dtype": [(name, name) for name in ITEM_BYTES],
    "lab.reduce_op": [("sum", "sum"), ("max", "maximum")],
}
USUAL_RANKS = 4


def spec_from_form(form: Mapping[str, str], primitives: list[str]) -> dict[str, Any]:
    """The untrusted spec a form asks for. What is left out keeps the lab's defaults, what is no number stays text."""
    lab: dict[str, Any] = {name: _number(form[f"lab.{name}"]) for name in _NUMBERS if f"lab.{name}" in form}
    lab |= {name: form[f"lab.{name}"] for name in _CHOICES if f"lab.{name}" in form}
    if "lab.ranks" in form:  # the whole form was sent, so that no box ticked means none
        lab["primitives"] = primitives
        lab["ranks"] = [_number(rank) for rank in form["lab.ranks"].split(",")] if form["lab.ranks"].strip() else None
        lab["root"] = _number(form["lab.root"]) if form.get("lab.root", "").strip() else None
    name = form.get("resources.host", "")
    host = Host.objects.filter(name=name).first() if "\x00" not in name else None
    return {
        "kind": "lab",
        "name": f"lab on {host.name}"[:100] if host else "lab",
        "layout": {"dp": _number(form.get("layout.dp", ""))},
        "resources": {"device": host.device if host else "cpu", "host": host.name if host else None},
        "lab": lab,
    }


def values_from_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values for a spec, which may be wrong; what it lacks has its default."""
    lab = {**LabSpec().model_dump(), **(spec.get("lab") or {})}
    return {
        "resources.host": spec.get("resources", {}).get("host") or "",
        "layout.dp": str(spec.get("layout", {}).get("dp", USUAL_RANKS)),
        "lab.ranks": ", ".join(map(str, lab["ranks"] or [])),
        "lab.root": "" if lab["root"] is None else str(lab["root"]),
        "lab.primitives": lab["primitives"],
        **{f"lab.{name}": str(lab[name]) for name in (*_NUMBERS, *_CHOICES)},
    }


def usual(host: Host | None) -> dict[str, Any]:
    """The spec that the page offers first."""
    return {
        "layout": {"dp": min(USUAL_RANKS, host.slots) if host else USUAL_RANKS},
        "resources": {"host": host.name if host else None},
    }


def errors_by_field(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Messages for the fields the form has, and lines for the rest."""
    known = values_from_spec({})
    beside: dict[str, str] = {}
    other: list[str] = []
    for problem in problems:
        field = re.sub(r"\.[0-9]+$", "", problem.field)  # an element of a list is told at its list
        field = "layout.dp" if field == "layout" else field
        if field in known:
            beside[field] = "; ".join(filter(None, [beside.get(field), problem.message]))
        else:
            other.append(f"{problem.field}: {problem.message}")
    return beside, other


def _number(text: str) -> int | str:
    return int(text) if _WHOLE.fullmatch(text.strip()) else text
