"""A stack as a spec has it: its constants, with what the spec says of the software applied to them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from planner.facts.layout import axis_group
from planner.facts.resources import SoftwareSpec, StackName
from planner.facts.spec import JobSpec
from planner.hardware.attention import FLASH_2
from planner.hardware.cluster import span
from planner.hardware.stacks import (
    ALL_TO_ALL,
    DETERMINISTIC_EXPERT_S,
    DETERMINISTIC_LAUNCH_S,
    EAGER_SCORES,
    FLASH_1,
    FP4_CASTS,
    FUSED_NORMS,
    GRAPHED,
    OVERLAPPED_EXPERTS,
    WHOLE_GRAPH,
    Stack,
)

# The trainer's compiled blocks, on the same GPUs as its eager ones; casts by one model, and their host by a guess.
COMPILED: dict[str, Any] = {"norms": 1.8, "passes": 1.8, "casts": 0.55, "cast_s": 2e-4}


class Said(NamedTuple):
    """Which stack, and what of it: specs for which these are equal are planned with the same constants.

    `compiled`: what runs here compiles its blocks; of other stacks it is known by their own settings.
    """

    stack: StackName
    software: SoftwareSpec | None
    overlaps: bool
    compiled: bool


class Stacks:
    """Of a table of stacks those that specs are planned with, on nodes of `per_node` ranks.

    `measured`: a host was measured with its software, of which nothing that a spec says is known better. `compiles`: it
    is known what compiling spares what runs here.
    """

    def __init__(
        self, stacks: Mapping[StackName, Stack], per_node: int, *, measured: bool = False, compiles: bool = False
    ) -> None:
        self._stacks, self._per_node, self._measured, self._compiles = stacks, per_node, measured, compiles
        self._made: dict[Hashable, Stack] = {}

    def said(self, spec: JobSpec) -> Said:
        """What of the spec decides on constants."""
        software = None if self._measured else spec.resources.software
        overlaps = software is not None and self._overlaps(spec, software)
        compiled = spec.resources.stack == "ours" and spec.train.compile and self._compiles
        return Said(spec.resources.stack, software, overlaps, compiled)

    def of(self, spec: JobSpec) -> Stack:
        """The constants that the spec is planned with."""
        said = self.said(spec)
        if said not in self._made:
            stack = self._stacks[said.stack]
            if said.compiled:
                stack = stack._replace(**COMPILED)
            self._made[said] = as_said(stack, said.software, overlaps=said.overlaps) if said.software else stack
        return self._made[said]

    def _overlaps(self, spec: JobSpec, software: SoftwareSpec) -> bool:
        """Where tokens do not leave their node, sending them beside products gains nothing that launching it in so many
        more pieces does not take: what gpt-oss on GB200 and Qwen3-235B on B300 take with it is what they take without,
        to 2%. In a graph nothing is launched."""
        if not software.overlap_experts:
            return False
        group = axis_group(spec.layout, "ep")
        return (
            software.cuda_graphs == "whole"
            or span(group.size, group.stride, self._per_node, spec.layout.world_size).nodes > 1
        )


def as_said(stack: Stack, software: SoftwareSpec, *, overlaps: bool) -> Stack:
    """The stack with what is said of it. `overlaps`: sending tokens to experts beside products gains time."""
    changed: dict[str, Any] = {}
    if software.deterministic:
        changed |= {"launch_s": DETERMINISTIC_LAUNCH_S, "expert_s": DETERMINISTIC_EXPERT_S}
    if software.cuda_graphs == "whole":
        changed |= WHOLE_GRAPH
    elif software.cuda_graphs != "none":
        changed["launch_s"] = changed.get("launch_s", stack.launch_s) * GRAPHED[software.cuda_graphs]
    if software.dispatcher == "alltoall":
        changed |= ALL_TO_ALL
    if overlaps:
        changed["hidden"] = {**stack.hidden, **OVERLAPPED_EXPERTS}
    if software.attention_kernel == "flash_1":
        changed["attention"] = FLASH_1
    elif software.attention_kernel == "flash_2":
        hopper = stack.attention_hopper
        changed["attention_hopper"] = hopper._replace(share=hopper.share * FLASH_2)
    elif software.attention_kernel == "eager":
        changed["scores"] = EAGER_SCORES
    if software.fused_norms:
        changed["norms"] = FUSED_NORMS
    if software.nvfp4:
        hidden = {axis: share for axis, share in changed.get("hidden", stack.hidden).items() if axis != "tp"}
        changed |= {"fp4": True, "casts": stack.casts * FP4_CASTS, "hidden": hidden}
    return stack._replace(**changed)
