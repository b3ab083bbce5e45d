"""The lab's form: what it has of a job spec, and the spec that it offers first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.datastructures import MultiValueDict

from jobs.models import Host
from jobs.pages.forms import derived
from planner.facts.resources import Resources
from planner.facts.spec import LabSpec, Layout, Problem

USUAL_RANKS = 4
FIELDS = (
    derived.fields_of("resources", Resources, only=["host"])
    | derived.fields_of("layout", Layout, only=["dp"])
    | derived.fields_of("lab", LabSpec)
)
_WORDS = {"lab.reduce_op": {"max": "maximum"}}


def hosts() -> list[Host]:
    """Hosts that a lab could run on now, those with GPUs first."""
    return list(Host.objects.taking().order_by("-device", "name"))


def first(connected: Iterable[Host]) -> Host | None:
    """The first of them that has room for a group: a collective takes two ranks."""
    return next((host for host in connected if host.slots >= 2), None)


def spec_from_form(form: MultiValueDict[str, str]) -> dict[str, Any]:
    """The untrusted spec a form asks for, on the host that it names; without one where there is no such host."""
    spec = {"lab": {}, "layout": {"dp": ""}, **derived.spec_from(FIELDS, form)}
    name = form.get("resources.host", "")
    host = Host.objects.present().filter(name=name).first() if "\x00" not in name else None
    spec["resources"] = {"device": host.device if host else "cpu", "host": host.name if host else None}
    return {"kind": "lab", "name": f"lab on {host.name}"[:100] if host else "lab", **spec}


def values_from_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The form's values for a spec, which may be wrong; what it lacks has its default."""
    return derived.values_of(FIELDS, {"layout": {"dp": USUAL_RANKS}, **spec})


def options_for(values: dict[str, Any]) -> derived.Options:
    """The choices of each field that has some."""
    return derived.options_of(FIELDS, _WORDS, values)


def limits() -> dict[str, str]:
    """What each number must lie between."""
    return derived.limits_of(FIELDS)


def usual(host: Host | None) -> dict[str, Any]:
    """The spec that the page offers first."""
    return {
        "layout": {"dp": min(USUAL_RANKS, host.slots) if host else USUAL_RANKS},
        "resources": {"host": host.name if host else None},
    }


def errors_by_field(problems: list[Problem]) -> tuple[dict[str, str], list[str]]:
    """Messages for the fields the form has, and lines for the rest."""
    return derived.errors_beside(problems, FIELDS, {"layout": "layout.dp"})
