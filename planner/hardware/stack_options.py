"""Apply software options to a stack, and provide its margins of error."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from planner.facts.layout import get_axis_group
from planner.facts.resources import CudaGraphs, SoftwareSpec, StackName
from planner.facts.spec import JobSpec
from planner.hardware.cluster import get_node_span
from planner.hardware.kernel_time import FLASH_2_FACTOR
from planner.hardware.stacks import FUSED_NORMS, OVERLAPPED_EXPERTS, STACKS, Stack

EAGER_SCORES = 5.8  # bytes of unfused attention, if scale, mask, and softmax in fp32 are separate kernels

# Megatron's all-to-all in place of DeepEP and HybridEP (token_dispatcher.py, `MoEAlltoAllTokenDispatcher`).
ALL_TO_ALL = {"dispatches_per_node": False, "sorts_dispatch": True}

# Share of a layer's host time that is left if the named modules are one CUDA graph: 17 kernels without those in it.
GRAPHED: dict[CudaGraphs, float] = {
    "none": 1.0,
    "router": 0.75,
    "attention": 0.6,
    "attention_and_router": 0.35,
    "whole": 0.0,
}

WHOLE_GRAPH: dict[str, float] = {"launch_s": 0.0, "expert_s": 0.0, "expert_cast_s": 0.0}


# Host time per kernel and per expert with Megatron's --deterministic-mode, from its own tests, which add gradients of
# experts one by one (--no-gradient-accumulation-fusion).
DETERMINISTIC_LAUNCH_S, DETERMINISTIC_EXPERT_S = 1.45e-4, 1.6e-4

# Relative to casts to fp8: one more pass for the scale of the tensor, and one with a Hadamard rotation (2509.25149).
FP4_CASTS = 1.75
FLASH_1 = 0.5  # rate of FlashAttention 1, relative to FlashAttention 2 in `scaling`


class StackKey(NamedTuple):
    """Stack and options that determine the constants of a spec.

    `compiled`: the spec compiles its blocks, and the stack has other constants then.
    """

    stack: StackName
    software: SoftwareSpec | None
    overlaps: bool
    compiled: bool


class Stacks:
    """Resolve the stack of a spec on nodes of `per_node` ranks.

    `measured`: the host is calibrated with its software, so options have no effect.
    `compiles`: the gain of compiled blocks is known.
    """

    def __init__(
        self, stacks: Mapping[StackName, Stack], per_node: int, *, measured: bool = False, compiles: bool = False
    ) -> None:
        self._stacks, self._per_node, self._measured, self._compiles = stacks, per_node, measured, compiles
        self._made: dict[Hashable, Stack] = {}

    def get_key(self, spec: JobSpec) -> StackKey:
        """Return the stack and options that determine the constants of a spec."""
        software = None if self._measured else spec.resources.software
        overlaps = software is not None and self._overlaps(spec, software)
        compiled = spec.train.compile and self._compiles and bool(self._stacks[spec.resources.stack].compiled)
        return StackKey(spec.resources.stack, software, overlaps, compiled)

    def get_stack(self, spec: JobSpec) -> Stack:
        """Return the stack with the options of a spec."""
        key = self.get_key(spec)
        if key not in self._made:
            stack = self._stacks[key.stack]
            if key.compiled:
                stack = stack._replace(**stack.compiled)
            self._made[key] = apply_options(stack, key.software, overlaps=key.overlaps) if key.software else stack
        return self._made[key]

    def _overlaps(self, spec: JobSpec, software: SoftwareSpec) -> bool:
        """Return whether overlapping expert communication saves time.

        Inside a node it does not, because the additional launches take as long: gpt-oss on GB200 and Qwen3-235B on B300
        take
        the same time with and without it, within 2%. A CUDA graph has no launches.
        """
        if not software.overlap_experts:
            return False
        group = get_axis_group(spec.layout, "ep")
        return (
            software.cuda_graphs == "whole"
            or get_node_span(group.size, group.stride, self._per_node, spec.layout.world_size).nodes > 1
        )


def apply_options(stack: Stack, software: SoftwareSpec, *, overlaps: bool) -> Stack:
    """Return the stack with its options applied.

    Args:
        overlaps: Overlapping expert communication saves time.
    """
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
        changed["overlap"] = {**stack.overlap, **OVERLAPPED_EXPERTS}
    if software.attention_kernel == "flash_1":
        changed["attention"] = FLASH_1
    elif software.attention_kernel == "flash_2":
        hopper = stack.attention_hopper
        changed["attention_hopper"] = hopper._replace(peak_factor=hopper.peak_factor * FLASH_2_FACTOR)
    elif software.attention_kernel == "eager":
        changed["scores"] = EAGER_SCORES
    if software.fused_norms:
        changed["norms"] = FUSED_NORMS
    if software.nvfp4:
        hidden = {axis: share for axis, share in changed.get("overlap", stack.overlap).items() if axis != "tp"}
        changed |= {"fp4": True, "casts": stack.casts * FP4_CASTS, "overlap": hidden}
    return stack._replace(**changed)


# Margin on accelerators of which no published step confirms a stack: 90% of the steps on V100, of three sources, with
# the unknown stack (`python -m benchmarks.published`).
UNMEASURED_MARGIN = 1.1

# (share of a step in which the device waits for its host, margin of error): a spec contains neither the speed of the
# host nor all CUDA graphs. The published rows with such waits are Megatron's.
HOST_MARGINS = ((0.2, 2.3), (0.001, 0.66))
# Margins with all known software options of the stack, which narrow the interval.
HOST_MARGINS_WITH_OPTIONS = ((0.2, 0.9),)
MARGINS_WITH_OPTIONS: dict[StackName, float] = {"scaling": 0.12}

# Bytes of a rank that a spec does not determine: workspaces of matmuls and communicators. In 69 of 70 of Megatron-LM's
# own tests the rest was smaller than this and `memory_margin` of their 0.6 to 52 GiB.
UNMODELED_BYTES = 2**29


def get_time_margin(name: StackName, accelerator: str, host_share: float, *, has_options: bool = False) -> float:
    """Return the margin of error of a step time as a fraction.

    Args:
        host_share: Fraction of the step in which the device waits for the host.
        has_options: The spec has all known options of the stack's software.
    """
    stack = STACKS[name]
    own = MARGINS_WITH_OPTIONS.get(name, stack.time_margin) if has_options else stack.time_margin
    by_host = next(
        (off for least, off in (HOST_MARGINS_WITH_OPTIONS if has_options else HOST_MARGINS) if host_share >= least), 0.0
    )
    return max(own if was_measured(name, accelerator) else UNMEASURED_MARGIN, by_host)


def was_measured(name: StackName, accelerator: str) -> bool:
    """Return whether published steps on such a device confirm the stack's constants."""
    stack = STACKS[name]
    return not stack.measured_on or bool(set(re.split(r"[^A-Z0-9]+", accelerator.upper())) & set(stack.measured_on))
