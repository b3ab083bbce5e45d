"""What NVIDIA's recipes of Megatron-Bridge repeat in backward, or send to the host instead, as its tags have it.

scripts/performance/configs/*/*_workload_base_configs.py (`recompute_modules`, `recompute_num_layers`,
`cpu_offloading_num_layers`) and, where these say nothing, the model's own recipe: `recompute_granularity` is None for
Llama, Qwen3 and gpt-oss (src/megatron/bridge/recipes/*).
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.recipes import Recipes, any_of, of_bridge, of_nemo_deepseek
from benchmarks.published.rows import PublishedRow
from planner.hardware.kernels import RecomputeModule


class Repeated(NamedTuple):
    """Modules of every layer, the share of layers that are repeated whole, the share that goes to the host."""

    modules: tuple[RecomputeModule, ...] = ()
    layers: float = 0.0
    offloaded: float = 0.0


_GPT_OSS = (  # "layernorm", "moe_act"
    Recipes("gpt-oss-120b", "h100|\\bb200", ""),
    Recipes("gpt-oss-120b", "gb200", "bf16"),
    Recipes("gpt-oss-120b", "gb200", "", before="26.06"),
)
_ACTIVATION = (
    Recipes("deepseek-v3", "gb300", "bf16"),
    Recipes("deepseek-v3", "gb300", "", before="26.02"),
)
_MLP = (
    Recipes("deepseek-v3", "gb200", "mxfp8", since="26.04", before="26.06"),
    Recipes("deepseek-v3", "gb200", "fp8", since="26.04"),
    Recipes("deepseek-v3", "gb200", "nvfp4", since="26.04"),
)
_LATENTS_AND_MLP = (
    Recipes("deepseek-v3|kimi-k2", "h100", ""),
    Recipes("deepseek-v3", r"\bb200", "", pp=8),
)
_ALL = (
    Recipes("deepseek-v3", r"\bb300", "bf16", before="26.02.01"),
    Recipes("deepseek-v3", r"\bb200", "nvfp4", pp=8),
)
# An empty list of modules, which Megatron takes as such (transformer_config.py puts attention in the place of none).
_NOTHING = (Recipes("deepseek-v3", "gb300", "mxfp8", since="26.06"),)
_LATENTS = (Recipes("deepseek-v3|kimi-k2", "", ""),)
_WHOLE = (
    Recipes("llama3.*-405b", r"\bb200", "nvfp4", before="26.06"),
    Recipes("llama3.*-405b", "gb200", "nvfp4", before="26.06", gpus=128),
)
# Layers of the model that go to the host, of 80 and 126, and those of them that are repeated whole; under FSDP.
_OFFLOADED = (
    (Recipes("llama3.*-70b", "gb300", "bf16"), 30 / 80),
    (Recipes("llama3.*-70b", "gb300", "fp8"), 20 / 80),
    (Recipes("llama3.*-70b", "gb200", "bf16"), 20 / 80),
    (Recipes("llama3.*-70b", "gb200", "fp8"), 40 / 80),
    (Recipes("llama3.*-70b", r"\bb200", "fp8", since="25.11"), 5 / 80),
    (Recipes("llama3.*-405b", r"\bg?b300", "bf16"), 40 / 126),
    (Recipes("llama3.*-405b", "gb300", "fp8"), 10 / 126),
    (Recipes("llama3.*-405b", "gb200", "fp8"), 92 / 126),
)
_SHARDED_BLOCK = (Recipes("llama3.*-70b", r"\bb200", "", before="25.11"),)
_BLOCK = (Recipes("llama3.*-8b", "h100", "fp8", since="25.11"),)


def repeated_by(row: PublishedRow) -> Repeated | None:
    """None where no recipe of Megatron-Bridge tells."""
    if of_nemo_deepseek(row):  # its launch.sh, `RM`
        return Repeated(("latents",) if "h100" in row.text("gpu").lower() else ("attention",))
    if not of_bridge(row):
        return None
    if row.count("zero", 0) == 3:
        offloaded = next((share for recipe, share in _OFFLOADED if any_of(row, (recipe,))), 0.0)
        return Repeated(layers=5 / 80 if any_of(row, _SHARDED_BLOCK) else 0.0, offloaded=offloaded)
    if any_of(row, _BLOCK):
        return Repeated(layers=5 / 32)
    if any_of(row, _WHOLE):
        return Repeated(layers=1.0)
    named: tuple[tuple[tuple[Recipes, ...], tuple[RecomputeModule, ...]], ...] = (
        (_GPT_OSS, ("norms", "activation")),
        (_ACTIVATION, ("activation",)),
        (_MLP, ("mlp",)),
        (_ALL, ("latents", "activation", "norms")),
        (_LATENTS_AND_MLP, ("latents", "mlp")),
        (_NOTHING, ()),
        (_LATENTS, ("latents",)),
    )
    return Repeated(next((modules for recipes, modules in named if any_of(row, recipes)), ()))
