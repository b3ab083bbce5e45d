"""Groups of fields that several forms have: engine, scheduling, and the software stack of an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.pages.forms import derived
from planner.facts.resources import STACK_OPTIONS, Resources, SoftwareSpec, get_option_names
from planner.facts.spec import JobSpec, RetrySpec, RunSpec

SCHEDULING_FIELDS = (
    derived.read_fields("", JobSpec, only=["project", "after", "after_failed"])
    | derived.read_fields("resources", Resources, only=["max_hosts", "pool", "labels"])
    | derived.read_fields("run", RunSpec)
    | derived.read_fields("retry", RetrySpec)
)
_SOFTWARE = "resources.software"
SOFTWARE_FIELDS = derived.read_fields(_SOFTWARE, SoftwareSpec)

# The labels of choices by field
LABELS: dict[str, Mapping[str, str]] = {
    "after_failed": {"cancel": "cancel this job", "start": "start anyway"},
    "resources.engine": {"hosts": "Meshboard hosts", "slurm": "Slurm"},
    f"{_SOFTWARE}.cuda_graphs": {
        "attention_and_router": "attention and router",
        "whole": "whole layers or steps",
    },
    f"{_SOFTWARE}.dispatcher": {"flex": "DeepEP, HybridEP", "alltoall": "all-to-all"},
    f"{_SOFTWARE}.attention_kernel": {
        "own": "default",
        "flash_1": "FlashAttention 1",
        "flash_2": "FlashAttention 2",
        "eager": "eager, unfused",
    },
}
# The stacks that each field is shown for
STACKS_BY_FIELD = {
    f"{_SOFTWARE}.{name}": " ".join(stack for stack, names in STACK_OPTIONS.items() if name in names)
    for name in SoftwareSpec.model_fields
}
# The choices per stack, for a field whose choices depend on the stack
CHOICES_BY_STACK = {
    f"{_SOFTWARE}.attention_kernel": " ".join(
        f"{stack}={','.join(('own', *names['attention_kernel']))}"
        for stack, names in STACK_OPTIONS.items()
        if "attention_kernel" in names
    )
}


def has_scheduling_changes(values: Mapping[str, Any]) -> bool:
    """Return whether a scheduling field differs from its default."""
    defaults = derived.format_values(SCHEDULING_FIELDS, {})
    return any(values.get(name, default) != default for name, default in defaults.items())


def drop_unused_engines(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of an engine that was not chosen, because the page sends them anyway."""
    resources = spec.get("resources", {})
    if resources.get("engine") != "slurm":
        resources.pop("slurm", None)
    return spec


def drop_unused_software(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of stacks that were not chosen, because the page sends them anyway."""
    resources = spec.get("resources", {})
    sent, defaults = resources.pop("software", {}), SoftwareSpec().model_dump()
    names = get_option_names(resources.get("stack", "ours"))
    if software := {name: sent[name] for name in names if name in sent and sent[name] != defaults[name]}:
        resources["software"] = software
    return spec
