"""What is known of the software that time is planned for, as forms and pages have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.pages.forms import derived
from planner.facts.resources import SoftwareSpec
from planner.facts.software import OPEN, open_to

SECTION = "resources.software"
FIELDS = derived.fields_of(SECTION, SoftwareSpec)
WORDS: dict[str, Mapping[str, str]] = {
    f"{SECTION}.cuda_graphs": {
        "attention_and_router": "attention, router",
        "whole": "whole layers or steps",
    },
    f"{SECTION}.dispatcher": {"flex": "DeepEP, HybridEP", "alltoall": "all-to-all"},
    f"{SECTION}.attention_kernel": {
        "own": "the stack's own",
        "flash_1": "FlashAttention 1",
        "flash_2": "FlashAttention 2",
        "eager": "eager, unfused",
    },
}
# The stacks of which each field may be told, by which pages show it.
STACKS_OF = {
    f"{SECTION}.{name}": " ".join(stack for stack, names in OPEN.items() if name in names)
    for name in SoftwareSpec.model_fields
}
# Of a field whose stacks do not have all of its values, those that each has.
VALUES_OF = {
    f"{SECTION}.attention_kernel": " ".join(
        f"{stack}={','.join(('own', *names['attention_kernel']))}"
        for stack, names in OPEN.items()
        if "attention_kernel" in names
    )
}


def without_others(spec: dict[str, Any]) -> dict[str, Any]:
    """A form's spec with what it tells of the stack that was chosen: fields of others are on the page all the same."""
    resources = spec.get("resources", {})
    sent = resources.pop("software", {})
    usual = SoftwareSpec().model_dump()
    shown = {name: sent[name] for name in open_to(resources.get("stack", "ours")) if name in sent}
    if told := {name: value for name, value in shown.items() if value != usual[name]}:
        resources["software"] = told
    return spec
