"""What NVIDIA's recipes for mixtures switch on by release, as their repository's tags have it.

Megatron-Bridge, scripts/performance/configs/*/*_workload_base_configs.py: v0.3.0 is release 26.02, v0.4.0 26.04, v0.5.0
26.06. `moe_a2a_overlap` sends one micro-batch's tokens beside the products of another; `cutedsl_fused_grouped_mlp`
computes an expert's MLP in one kernel, with the whole iteration in a CUDA graph; `cuda_graph_scope` names the modules
that are one otherwise. dgxc-benchmarking: its launch scripts by tag.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.rows import PublishedRow
from planner.hardware.stacks import (
    ALL_TO_ALL,
    EARLY_BLACKWELL_FP8,
    GRAPHED_ATTENTION,
    GRAPHED_ROUTER,
    OVERLAPPED_EXPERTS,
    STACKS,
    WHOLE_GRAPH,
)


class _Recipes(NamedTuple):
    """Patterns of a model and of an accelerator, a precision as it begins, releases `since` and `before`."""

    model: str
    gpu: str
    precision: str
    since: str = ""
    before: str = "99"
    pp: int | None = None
    ep: int | None = None


WINDOW = 128
_OVERLAPPED = (
    _Recipes("qwen3-235b", "h100", ""),
    _Recipes("qwen3-235b", "b300", "", before="26.02.01"),
    _Recipes("qwen3-30b", "h100", "", before="26.02.01"),
    _Recipes("gpt-oss-120b", "gb200", "bf16", since="26.04"),
    _Recipes("deepseek-v3", r"\bb200", "mxfp8", pp=8),
)
# Without `moe_flex_dispatcher_backend`, or with `moe_token_dispatcher_type` "alltoall" beside it: qwen3_llm_pretrain.py
# for B200, B300 and H100; gpt_oss_llm_pretrain.py, which reads the first from v0.4.0 on.
_ALL_TO_ALL = (
    _Recipes("gpt-oss", "h100", ""),
    _Recipes("gpt-oss", "gb300", "bf16"),
    _Recipes("gpt-oss", "gb200", "", before="26.04"),
    _Recipes("gpt-oss", "gb200", "bf16", since="26.06"),
    _Recipes("gpt-oss", r"\bb[23]00", "", ep=64),
    _Recipes("gpt-oss", r"\bb200", "", since="26.06"),
    _Recipes("qwen3-235b", "h100", ""),
    _Recipes("qwen3-235b", r"\bb200", ""),
    _Recipes("qwen3-235b", r"\bb300", "", before="26.06"),
)
_WHOLE = (
    _Recipes("deepseek-v3|qwen3|gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
    _Recipes("qwen3-30b", "b300", "mxfp8", since="26.06"),
)
_ATTENTION = (
    _Recipes("deepseek-v3|qwen3-235b", "gb200", ""),
    _Recipes("deepseek-v3", "gb300", "bf16"),
    _Recipes("deepseek-v3", r"\bb300", "", since="26.06"),
    _Recipes("deepseek-v3", r"\bb200", "mxfp8", pp=8),
    _Recipes("gpt-oss-120b", "b300", ""),
    _Recipes("qwen3-235b", "gb300", "", pp=4),
    _Recipes("qwen3-30b", "gb200", ""),
    _Recipes("qwen3-30b", r"\bb200", "", since="26.04"),
)
_ROUTER = (
    _Recipes("qwen3", "gb300", ""),
    _Recipes("qwen3-30b", "b[23]00", ""),
    _Recipes("qwen3-30b", "h100", "bf16"),
    _Recipes("kimi-k2", "gb200", ""),
)
_DENSE_WHOLE = (
    _Recipes("llama3.*-8b", "b[23]00", ""),
    _Recipes("llama3.*-70b", r"\bb200", "bf16"),
)


def switched_on(row: PublishedRow) -> dict[str, Any]:
    """Constants of the stack that a row's recipe changes."""
    early = {"gemm_fp8": EARLY_BLACKWELL_FP8} if _is_early_blackwell(row) else dict[str, Any]()
    if row.source == "NVIDIA/dgxc-benchmarking":
        return early | _of_dgxc(row)
    if row.source != "NVIDIA-NeMo/Megatron-Bridge" or not row.release:
        return early
    megatron, changed = STACKS["megatron"], dict[str, Any]()
    if "gpt-oss" in row.text("model").lower():
        changed |= {"experts_biased": True, "experts_clamped": True}
        changed["attention"] = megatron.attention / _looked_back(row.count("seq"))
    if _any(row, _ALL_TO_ALL):
        changed |= ALL_TO_ALL
    whole = _any(row, _WHOLE)
    if whole or _any(row, _OVERLAPPED):
        changed["hidden"] = {**megatron.hidden, **OVERLAPPED_EXPERTS}
    if whole or _any(row, _DENSE_WHOLE):
        return changed | WHOLE_GRAPH
    if _any(row, _ATTENTION):
        changed["launch_s"] = megatron.launch_s * GRAPHED_ATTENTION
    elif _any(row, _ROUTER):
        changed["launch_s"] = megatron.launch_s * GRAPHED_ROUTER
    return changed


def _looked_back(seq: int) -> float:
    """Share of the causal scores that gpt-oss computes: every second layer's queries see 128 tokens (its provider's
    `window_size`, `window_attn_skip_freq`)."""
    window = min(1.0, WINDOW / seq)
    return (1 + window * (2 - window)) / 2


def _of_dgxc(row: PublishedRow) -> dict[str, Any]:
    """NeMo's graphs on GB200 (nemotron/launch.sh, grok1/launch.sh: --cuda_graphs true). Grok 1 before: each expert by
    itself, buffers of a capacity, tokens sent by all-to-all (grok1/grok1_314b.yaml). DeepSeek: DeepEP on H100 alone
    (NeMo, scripts/performance/llm/pretrain_deepseek_v3.py)."""
    model, graphed = row.text("model").lower(), row.text("gpu").lower().startswith("gb200")
    changed: dict[str, Any] = {}
    if graphed and "deepseek" in model:
        changed |= ALL_TO_ALL
    if graphed and re.search("nemotron4|grok", model):
        changed |= WHOLE_GRAPH
    if "grok" in model:
        changed |= {"shares_dispatch": False, "gathers_experts": True, "syncs_experts": False}
        if not graphed:
            changed["experts_apart"] = True
    return changed


def _is_early_blackwell(row: PublishedRow) -> bool:
    """Whether a row is of the first software for Blackwell, of spring 2025."""
    of_spring = re.search(r"dgxc-benchmarking@v25\.0|training_results_v5\.0", row.text("source_repo_path"))
    return of_spring is not None and re.search(r"b200", row.text("gpu").lower()) is not None


def _any(row: PublishedRow, recipes: tuple[_Recipes, ...]) -> bool:
    return any(_is(row, recipe) for recipe in recipes)


def _is(row: PublishedRow, recipe: _Recipes) -> bool:
    return (
        re.search(recipe.model, row.text("model").lower()) is not None
        and re.search(recipe.gpu, row.text("gpu").lower()) is not None
        and row.text("precision").lower().startswith(recipe.precision)
        and recipe.since <= row.release < recipe.before
        and recipe.pp in (None, row.count("pp"))
        and recipe.ep in (None, row.count("ep"))
    )
