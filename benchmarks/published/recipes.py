"""What NVIDIA's recipes for mixtures switch on by release, as their repository's tags have it.

Megatron-Bridge, scripts/performance/configs/*/*_workload_base_configs.py: v0.3.0 is release 26.02, v0.4.0 26.04, v0.5.0
26.06. `moe_a2a_overlap` sends one micro-batch's tokens beside the products of another; `cutedsl_fused_grouped_mlp`
computes an expert's MLP in one kernel, with the whole iteration in a CUDA graph.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.rows import PublishedRow
from planner.hardware.stacks import FUSED_EXPERTS, OVERLAPPED_EXPERTS, STACKS


class _Recipes(NamedTuple):
    """Patterns of a model and of an accelerator, a precision as it begins, releases `since` and `before`."""

    model: str
    gpu: str
    precision: str
    since: str = ""
    before: str = "99"
    pp: int | None = None


_OVERLAPPED = (
    _Recipes("qwen3-235b", "h100", ""),
    _Recipes("qwen3-235b", "b300", "", before="26.02.01"),
    _Recipes("qwen3-30b", "h100", "", before="26.02.01"),
    _Recipes("gpt-oss-120b", "gb200", "bf16", since="26.04"),
    _Recipes("deepseek-v3", r"\bb200", "mxfp8", pp=8),
)
_FUSED = (
    _Recipes("deepseek-v3|qwen3|gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
    _Recipes("qwen3-30b", "b300", "mxfp8", since="26.06"),
)


def switched_on(row: PublishedRow) -> dict[str, Any]:
    """Constants of the stack that a row's recipe changes."""
    if row.source != "NVIDIA-NeMo/Megatron-Bridge" or not row.release:
        return {}
    fused = any(_is(row, recipe) for recipe in _FUSED)
    if not fused and not any(_is(row, recipe) for recipe in _OVERLAPPED):
        return {}
    changed = {"hidden": {**STACKS["megatron"].hidden, **OVERLAPPED_EXPERTS}}
    return changed | FUSED_EXPERTS if fused else changed


def _is(row: PublishedRow, recipe: _Recipes) -> bool:
    return (
        re.search(recipe.model, row.text("model").lower()) is not None
        and re.search(recipe.gpu, row.text("gpu").lower()) is not None
        and row.text("precision").lower().startswith(recipe.precision)
        and recipe.since <= row.release < recipe.before
        and recipe.pp in (None, row.count("pp"))
    )
