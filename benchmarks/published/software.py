"""Constants of the stack of a row, with those of the kernels that it names."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.published.megatron_tests import (
    EXPERTS_APART,
    FUSED_LOSS,
    LOCAL,
    MADE_AGAIN,
    MAKES_ACTIVATIONS_AGAIN,
    MAKES_AGAIN,
    OFFLOADS,
    SENDS_TO_ALL,
    compute_rotary_s,
    get_host_factor,
    get_mtp_layers,
    get_test_graphs,
    is_megatron_test,
)
from benchmarks.published.mixtures import get_expert_tp
from benchmarks.published.recipes import get_stack_changes
from benchmarks.published.recompute import find_recompute
from benchmarks.published.rows import PublishedRow, has_unsharded_ends, is_kempner
from planner.facts.resources import StackName
from planner.facts.spec import Layout, ModelSpec
from planner.hardware.stack_options import (
    ALL_TO_ALL,
    ASYNC_TP,
    DETERMINISTIC_EXPERT_S,
    DETERMINISTIC_LAUNCH_S,
    EAGER_SCORES,
    FLASH_1,
    FP4_CASTS,
    GRAPHED,
    JOINED_LOSS,
    LOCAL_LAUNCH_S,
)
from planner.hardware.stacks import EAGER_NORMS, FUSED_NORMS, STACKS, Stack


def build_stack(row: PublishedRow, text: str, stack: StackName, model: ModelSpec, layout: Layout) -> Stack:
    """Return the constants of the stack with those of the kernels of the row."""
    changed: dict[str, Any] = get_stack_changes(row)
    if "fp4" in row.text("precision").lower():
        changed |= {"fp4": True, "casts": STACKS[stack].casts * FP4_CASTS}
    if repeated := find_recompute(row):
        changed |= {"recompute_modules": repeated.modules, "recompute_fraction": repeated.layers}
        changed["offload_fraction"] = repeated.offloaded
    if is_megatron_test(row):
        changed |= _replace_test_host_constants(row, text, model)
        if re.search(FUSED_LOSS, text):
            changed["loss"] = JOINED_LOSS
        if re.search(SENDS_TO_ALL, text):
            changed |= ALL_TO_ALL
        if re.search(MAKES_AGAIN, text):
            changed["recompute_modules"] = MADE_AGAIN
        elif re.search(MAKES_ACTIVATIONS_AGAIN, text):
            changed["recompute_modules"] = ("activation",)
        changed["offload_fraction"] = float(re.search(OFFLOADS, text) is not None)
        changed["separate_experts"] = re.search(EXPERTS_APART, text) is not None
        changed["head_passes"] = 2 if get_mtp_layers(row, text) else 1
    if re.search("qwen3|qk_layernorm", text):
        changed["normalizes_heads"] = True
    if row.has_adapters:
        changed["freezes_weights"] = True
    if is_kempner(row):
        changed |= {"reduces_once": True, "gathers_logits": not has_unsharded_ends(row)}
        if stack == "fsdp2_eager":  # not compiled: model/norm.py, distributed/tensor_parallel.py
            changed |= {"norms": EAGER_NORMS, "gathers_each_input": True}
    if row.source == "pytorch/torchtitan" and "rowwise" not in row.text("precision"):  # float8_tensor_parallel.py
        changed["narrow_gathers"] = True
    if re.search(r"async ?tp", text):
        changed["overlap"] = ASYNC_TP
    if kernel := get_attention_kernel(row):
        changed["norms"] = FUSED_NORMS if "rms kernel" in kernel else EAGER_NORMS
        if kernel.startswith("torch"):
            changed["scores"] = EAGER_SCORES
        elif is_flash_attention_1(kernel):
            changed["attention"] = FLASH_1
    kernels = STACKS[stack]._replace(**changed)
    if model.moe:  # the host has as many experts a rank as the row's expert ranks leave, not the planned ones'
        share = layout.ep / max(1, row.count("ep", 1))
        kernels = kernels._replace(
            expert_s=kernels.expert_s * share,
            expert_cast_s=kernels.expert_cast_s * share,
            replicates_experts=get_expert_tp(row, text, layout.tp) == 1,
        )
    return kernels


def get_attention_kernel(row: PublishedRow) -> str:
    """Return the attention kernel of a row of scaling tests with its norms, or an empty text."""
    found = re.search(r"attention kernel ([^;]*)", row.text("note").lower())
    return found[1].strip() if found else ""


def is_flash_attention_1(kernel: str) -> bool:
    return re.match(r"flash_attention(v?1|$)", kernel) is not None


def _replace_test_host_constants(row: PublishedRow, text: str, model: ModelSpec) -> dict[str, Any]:
    """Replace host constants for Megatron-LM's tests by the machine that recorded the row."""
    launch = LOCAL_LAUNCH_S if re.search(LOCAL, text) else DETERMINISTIC_LAUNCH_S
    launch *= GRAPHED[get_test_graphs(text)]
    host = get_host_factor(row)
    forward, backward = compute_rotary_s(text, model, launch)
    layer = forward * host, backward * host
    return {"launch_s": launch * host, "expert_s": DETERMINISTIC_EXPERT_S * host, "layer_s": layer}
