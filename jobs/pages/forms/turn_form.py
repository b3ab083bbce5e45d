"""The scheduling fields of a form: project, hosts, limits, retries and dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.pages.forms import derived
from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, RetrySpec, RunSpec

FIELDS = (
    derived.fields_of("", JobSpec, only=["project", "after", "after_failed"])
    | derived.fields_of("resources", Resources, only=["max_hosts", "pool", "labels"])
    | derived.fields_of("run", RunSpec)
    | derived.fields_of("retry", RetrySpec)
)
WORDS: dict[str, Mapping[str, str]] = {"after_failed": {"cancel": "cancel this job", "start": "start anyway"}}


def has_changes(values: Mapping[str, Any]) -> bool:
    """Return whether a field differs from its default."""
    usual = derived.values_of(FIELDS, {})
    return any(values.get(name, usual[name]) != usual[name] for name in FIELDS)
