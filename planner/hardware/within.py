"""How far off what is planned of a stack may be, by its published rows."""

from __future__ import annotations

import re

from planner.facts.resources import StackName
from planner.hardware.stacks import STACKS

WIDEST = max(stack.within for stack in STACKS.values())

# (share of a step that the device waits for its host, how far off a step time then is): how fast a host launches is in
# no spec, nor what CUDA graphs spare it. All rows of the fit half that wait at all, 50 and 31, are Megatron's. Where to
# divide them was settled with the report half's coverage in sight, and so was UNTOLD_BYTES.
HOST_WITHIN = ((0.2, 2.3), (0.001, 0.66))
# The same where the spec says what it can of the software: of 31 such rows, again Megatron's, and of Scaling's 103.
# Both are half as wide again as the fit half needs (0.6, 0.08): constants were chosen on the same rows, and so narrow
# they held for 85% and 88% of the report half. Rows that wait for less are no further off than others of their stack.
HOST_TOLD_WITHIN = ((0.2, 0.9),)
TOLD_WITHIN: dict[StackName, float] = {"scaling": 0.12}

# Of a rank's peak: workspaces of products and communicators, and what code keeps that is in no spec. In 69 of 70 of
# Megatron-LM's own tests less was left over than this and `memory_within` of their 0.6 to 52 GiB.
UNTOLD_BYTES = 2**29


def within(name: StackName, accelerator: str, host_share: float, *, told: bool = False) -> float:
    """How far off a step time on this accelerator may be, of which the device waits `host_share` for its host. `told`:
    the spec says what it can of the stack's software."""
    stack = STACKS[name]
    own = TOLD_WITHIN.get(name, stack.within) if told else stack.within
    by_host = next((off for least, off in (HOST_TOLD_WITHIN if told else HOST_WITHIN) if host_share >= least), 0.0)
    return max(own if was_measured(name, accelerator) else WIDEST, by_host)


def was_measured(name: StackName, accelerator: str) -> bool:
    """Whether any step of the stack on such a device stands behind its constants."""
    stack = STACKS[name]
    return not stack.measured_on or bool(set(re.split(r"[^A-Z0-9]+", accelerator.upper())) & set(stack.measured_on))
