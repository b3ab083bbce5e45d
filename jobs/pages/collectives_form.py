"""The benchmark form: its fields, and the spec that it shows first."""

from __future__ import annotations

from typing import Any

from django.utils.datastructures import MultiValueDict

from jobs.models import Host
from jobs.pages.forms import derived
from jobs.runs.collectives.results import DEFAULT_RANKS
from planner.facts.resources import Resources
from planner.facts.spec import LabSpec, Layout
from planner.facts.validation import Problem

FIELDS = (
    derived.fields_of("resources", Resources, only=["host"])
    | derived.fields_of("layout", Layout, only=["dp"])
    | derived.fields_of("lab", LabSpec)
)
_WORDS = {"lab.reduce_op": {"max": "maximum"}}


def spec_from_form(form: MultiValueDict[str, str]) -> dict[str, Any]:
    """Return the unchecked spec of a form. Its host is None if no such host is connected."""
    spec = {"lab": {}, "layout": {"dp": ""}, **derived.spec_from(FIELDS, form)}
    name = form.get("resources.host", "")
    host = Host.objects.present().filter(name=name).first() if "\x00" not in name else None
    spec["resources"] = {"device": host.device if host else "cpu", "host": host.name if host else None}
    return {"kind": "lab", "name": f"collectives on {host.name}"[:100] if host else "collectives", **spec}


def values_from_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the form values of a spec, which may be invalid. Missing fields get their default."""
    return derived.values_of(FIELDS, {"layout": {"dp": DEFAULT_RANKS}, **spec})


def options_for(values: dict[str, Any]) -> derived.Options:
    """Return the choices of each field with choices."""
    return derived.options_of(FIELDS, _WORDS, values)


def limits() -> dict[str, str]:
    """Return the allowed range of each number as text."""
    return derived.limits_of(FIELDS)


def defaults() -> dict[str, str]:
    """Return the default of each number as text."""
    return derived.defaults_of(FIELDS)


def usual(host: Host | None) -> dict[str, Any]:
    """Return the spec that the form shows first."""
    return {
        "layout": {"dp": min(DEFAULT_RANKS, host.slots) if host else DEFAULT_RANKS},
        "resources": {"host": host.name if host else None},
    }


def errors_by_field(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Return messages by field, and lines for problems of other fields."""
    return derived.errors_beside(problems, FIELDS, {"layout": "layout.dp"})
