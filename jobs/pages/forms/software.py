"""The software stack that estimates are for, as the Planner shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.pages.forms import derived
from planner.facts.resources import STACK_OPTIONS, SoftwareSpec, get_option_names

SECTION = "resources.software"
FIELDS = derived.fields_of(SECTION, SoftwareSpec)
WORDS: dict[str, Mapping[str, str]] = {
    f"{SECTION}.cuda_graphs": {
        "attention_and_router": "attention and router",
        "whole": "whole layers or steps",
    },
    f"{SECTION}.dispatcher": {"flex": "DeepEP, HybridEP", "alltoall": "all-to-all"},
    f"{SECTION}.attention_kernel": {
        "own": "default",
        "flash_1": "FlashAttention 1",
        "flash_2": "FlashAttention 2",
        "eager": "eager, unfused",
    },
}
# The stacks that each field is shown for.
STACKS_OF = {
    f"{SECTION}.{name}": " ".join(stack for stack, names in STACK_OPTIONS.items() if name in names)
    for name in SoftwareSpec.model_fields
}
# The values per stack, for a field whose values depend on the stack.
VALUES_OF = {
    f"{SECTION}.attention_kernel": " ".join(
        f"{stack}={','.join(('own', *names['attention_kernel']))}"
        for stack, names in STACK_OPTIONS.items()
        if "attention_kernel" in names
    )
}


def without_others(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of stacks that were not chosen, because the page sends them anyway."""
    resources = spec.get("resources", {})
    sent = resources.pop("software", {})
    usual = SoftwareSpec().model_dump()
    shown = {name: sent[name] for name in get_option_names(resources.get("stack", "ours")) if name in sent}
    if told := {name: value for name, value in shown.items() if value != usual[name]}:
        resources["software"] = told
    return spec
