"""Recompute and offload of NVIDIA's recipes in Megatron-Bridge, from its tags.

Source: scripts/performance/configs/*/*_workload_base_configs.py (`recompute_modules`, `recompute_num_layers`,
`cpu_offloading_num_layers`). If they have none, the recipe of the model: `recompute_granularity` is None for Llama,
Qwen3, and gpt-oss (src/megatron/bridge/recipes/*).
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.recipes import RecipePattern, is_megatron_bridge, is_nemo_deepseek, matches_any
from benchmarks.published.rows import PublishedRow
from planner.hardware.kernels import RecomputeModule


class RecipeRecompute(NamedTuple):
    """Recomputed modules of each layer, share of layers recomputed whole, and share offloaded to the host."""

    modules: tuple[RecomputeModule, ...] = ()
    layers: float = 0.0
    offloaded: float = 0.0


_GPT_OSS = (  # "layernorm", "moe_act"
    RecipePattern("gpt-oss-120b", "h100|\\bb200", ""),
    RecipePattern("gpt-oss-120b", "gb200", "bf16"),
    RecipePattern("gpt-oss-120b", "gb200", "", before="26.06"),
)
_ACTIVATION = (
    RecipePattern("deepseek-v3", "gb300", "bf16"),
    RecipePattern("deepseek-v3", "gb300", "", before="26.02"),
)
_MLP = (
    RecipePattern("deepseek-v3", "gb200", "mxfp8", since="26.04", before="26.06"),
    RecipePattern("deepseek-v3", "gb200", "fp8", since="26.04"),
    RecipePattern("deepseek-v3", "gb200", "nvfp4", since="26.04"),
)
_LATENTS_AND_MLP = (
    RecipePattern("deepseek-v3|kimi-k2", "h100", ""),
    RecipePattern("deepseek-v3", r"\bb200", "", pp=8),
)
_ALL = (
    RecipePattern("deepseek-v3", r"\bb300", "bf16", before="26.02.01"),
    RecipePattern("deepseek-v3", r"\bb200", "nvfp4", pp=8),
)
# An empty list of modules, which Megatron takes as such (transformer_config.py puts attention in the place of none).
_NOTHING = (RecipePattern("deepseek-v3", "gb300", "mxfp8", since="26.06"),)
_LATENTS = (RecipePattern("deepseek-v3|kimi-k2", "", ""),)
_WHOLE = (
    RecipePattern("llama3.*-405b", r"\bb200", "nvfp4", before="26.06"),
    RecipePattern("llama3.*-405b", "gb200", "nvfp4", before="26.06", gpus=128),
)
# Layers of the model that go to the host, of 80 and 126, and those of them that are repeated whole; under FSDP.
_OFFLOADED = (
    (RecipePattern("llama3.*-70b", "gb300", "bf16"), 30 / 80),
    (RecipePattern("llama3.*-70b", "gb300", "fp8"), 20 / 80),
    (RecipePattern("llama3.*-70b", "gb200", "bf16"), 20 / 80),
    (RecipePattern("llama3.*-70b", "gb200", "fp8"), 40 / 80),
    (RecipePattern("llama3.*-70b", r"\bb200", "fp8", since="25.11"), 5 / 80),
    (RecipePattern("llama3.*-405b", r"\bg?b300", "bf16"), 40 / 126),
    (RecipePattern("llama3.*-405b", "gb300", "fp8"), 10 / 126),
    (RecipePattern("llama3.*-405b", "gb200", "fp8"), 92 / 126),
)
_SHARDED_BLOCK = (RecipePattern("llama3.*-70b", r"\bb200", "", before="25.11"),)
_BLOCK = (RecipePattern("llama3.*-8b", "h100", "fp8", since="25.11"),)


def find_recompute(row: PublishedRow) -> RecipeRecompute | None:
    """Return the recompute of a row, or None if no recipe of Megatron-Bridge matches."""
    if is_nemo_deepseek(row):  # its launch.sh, `RM`
        return RecipeRecompute(("latents",) if "h100" in row.text("gpu").lower() else ("attention",))
    if not is_megatron_bridge(row):
        return None
    if row.count("zero", 0) == 3:
        offloaded = next((share for recipe, share in _OFFLOADED if matches_any(row, (recipe,))), 0.0)
        return RecipeRecompute(layers=5 / 80 if matches_any(row, _SHARDED_BLOCK) else 0.0, offloaded=offloaded)
    if matches_any(row, _BLOCK):
        return RecipeRecompute(layers=5 / 32)
    if matches_any(row, _WHOLE):
        return RecipeRecompute(layers=1.0)
    named: tuple[tuple[tuple[RecipePattern, ...], tuple[RecomputeModule, ...]], ...] = (
        (_GPT_OSS, ("norms", "activation")),
        (_ACTIVATION, ("activation",)),
        (_MLP, ("mlp",)),
        (_ALL, ("latents", "activation", "norms")),
        (_LATENTS_AND_MLP, ("latents", "mlp")),
        (_NOTHING, ()),
        (_LATENTS, ("latents",)),
    )
    return RecipeRecompute(next((modules for recipes, modules in named if matches_any(row, recipes)), ()))
