"""Settings of NVIDIA's recipes for mixtures by release, from the tags of their repositories.

Megatron-Bridge, scripts/performance/configs/*/*_workload_base_configs.py: v0.1.0 is release 25.09, v0.2.0 25.11, v0.3.0
26.02, v0.3.1 26.02.01, v0.4.0 26.04, v0.4.2 26.04.01, v0.5.0 26.06, v0.5.1 26.06.01. `moe_a2a_overlap` overlaps the
all-to-all of one micro-batch with matmuls of another. `cutedsl_fused_grouped_mlp` computes an expert's MLP in one
kernel, with the whole iteration in a CUDA graph. `cuda_graph_scope` names the modules that are captured otherwise.
dgxc-benchmarking: launch scripts by tag.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.megatron_tests import COUNTS_ENDS
from benchmarks.published.rows import PublishedRow
from planner.facts.resources import CudaGraphs
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.kernel_time import (
    CUDNN_HOPPER,
    EARLY_CUDNN_BLACKWELL,
    FLASH_2_FACTOR,
    FP8_LATENT_FACTOR,
    FP8_WINDOWED_FACTOR,
)
from planner.hardware.stack_options import (
    ALL_TO_ALL,
    CURRENT_CASTS,
    EARLY_BLACKWELL_FP8,
    EARLY_CAST_S,
    FUSED_LOSS,
    GRAPHED,
    JOINED_LOSS,
    OVERLAPPED_EXPERTS,
    SLOW_BIAS_SUMS,
    WHOLE_GRAPH,
)
from planner.hardware.stacks import STACKS


class RecipePattern(NamedTuple):
    """Patterns of model and accelerator, prefix of the precision, and releases from `since` to `before`."""

    model: str
    gpu: str
    precision: str
    since: str = ""
    before: str = "99"
    pp: int | None = None
    ep: int | None = None
    gpus: int | None = None


_OVERLAPPED = (
    RecipePattern("qwen3-235b", "h100", "", since="25.11"),
    RecipePattern("qwen3-235b", r"\bb200", "", since="25.11", before="26.02"),
    RecipePattern("qwen3-235b", r"\bb300", "", before="26.02.01"),
    RecipePattern("qwen3-30b", "h100", "", since="25.11", before="26.02.01"),
    RecipePattern("gpt-oss-120b", "gb200", "bf16", since="26.04"),
    RecipePattern("gpt-oss-120b", "gb200", "mxfp8", since="26.04"),
    RecipePattern("deepseek-v3", r"\bb200", "mxfp8", pp=8),
    RecipePattern("deepseek-v3", r"\bb200", "nvfp4", pp=8),
    RecipePattern("deepseek-v3", "h100", "", before="26.02"),
)
# Recipes without `moe_flex_dispatcher_backend`, or with `moe_token_dispatcher_type` "alltoall" in addition. They are
# qwen3_llm_pretrain.py for B200, B300 and H100, and gpt_oss_llm_pretrain.py, which reads the setting since v0.4.0.
_ALL_TO_ALL = (
    RecipePattern("gpt-oss", "h100", ""),
    RecipePattern("gpt-oss", "gb300", "bf16"),
    RecipePattern("gpt-oss", "gb300", "", before="26.06"),
    RecipePattern("gpt-oss", "gb200", "", before="26.04"),
    RecipePattern("gpt-oss", "gb200", "bf16", since="26.04.01"),
    RecipePattern("gpt-oss", "gb200", "mxfp8", since="26.04.01", before="26.06"),
    RecipePattern("gpt-oss", r"\bb[23]00", "", ep=64),
    RecipePattern("gpt-oss", r"\bb200", "", since="26.04.01"),
    RecipePattern("qwen3-235b", "h100", ""),
    RecipePattern("qwen3-235b", r"\bb200", "", before="26.06.01"),
    RecipePattern("qwen3-235b", r"\bb200", "bf16"),
    RecipePattern("qwen3-235b", r"\bb200", "fp8"),
    RecipePattern("qwen3-235b", r"\bb200", "nvfp4"),
    RecipePattern("qwen3-235b", r"\bb300", "", before="26.04.01"),
    RecipePattern("qwen3-30b", r"\bb200", "", before="26.02.01"),
    RecipePattern("qwen3-30b", "h100", "", before="26.02"),
    RecipePattern("deepseek-v3", r"\bb200", "", before="26.02"),
)
# Tokens beyond a capacity are dropped, and sent by all-to-all: v0.1.0's run_script.py (`apply_moe_token_drop`).
_DROPPING = (
    RecipePattern("qwen3", "", "", before="25.11"),
    RecipePattern("deepseek-v3", "b200", "", before="25.11"),
)
_WHOLE = (
    RecipePattern("deepseek-v3|qwen3|gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
    RecipePattern("qwen3-30b", "b300", "mxfp8", since="26.06"),
    RecipePattern("qwen3", r"\bb[23]00", "mxfp8", since="26.06.01"),
    RecipePattern("deepseek-v3", r"\bb300", "mxfp8", since="26.06.01"),
)
# v0.1.0's `cuda_graphs`: of whole layers, which drop tokens.
_LAYERS_WHOLE = (
    RecipePattern("qwen3", "gb200", "", before="25.11"),
    RecipePattern("qwen3-30b", r"\bb200", "", before="25.11"),
)
_ATTENTION = (
    RecipePattern("deepseek-v3", "gb200", "", since="26.02"),
    RecipePattern("qwen3-235b", "gb200", ""),
    RecipePattern("deepseek-v3", "gb300", "bf16"),
    RecipePattern("deepseek-v3", "gb300", "", before="26.02"),
    RecipePattern("deepseek-v3", r"\bb300", "", since="26.04.01"),
    RecipePattern("deepseek-v3", r"\bb200", "mxfp8", pp=8),
    RecipePattern("gpt-oss-120b", "b300", ""),
    RecipePattern("qwen3-235b", "gb300", "", since="26.02.01", pp=4),
    RecipePattern("qwen3-235b", "gb300", "fp8", pp=4),
    RecipePattern("qwen3-235b", "gb300", "mxfp8", pp=4),
    RecipePattern("qwen3-30b", "gb200", "bf16"),
    RecipePattern("qwen3-30b", "gb200", "fp8"),
    RecipePattern("qwen3-30b", r"\bb200", "", since="26.02.01"),
)
_ROUTER = (
    RecipePattern("qwen3", "gb300", ""),
    RecipePattern("qwen3-30b", "b[23]00", ""),
    RecipePattern("qwen3-30b", "h100", "bf16"),
    RecipePattern("deepseek-v3", "gb200", "", since="25.11"),
    RecipePattern("kimi-k2", "gb200", ""),
)
_DENSE_WHOLE = (
    RecipePattern("llama3.*-8b", "b[23]00", "bf16"),
    RecipePattern("llama3.*-8b", "b[23]00", "fp8"),
    RecipePattern("llama3.*-8b", "b[23]00", "mxfp8"),
    RecipePattern("llama3.*-8b", "gb300", "nvfp4"),
    RecipePattern("llama3.*-70b", "gb200", "nvfp4", since="26.06"),
    RecipePattern("llama3.*-70b", r"\bb200", "bf16"),
)
# `cutedsl_fused_grouped_mlp` of experts that have biases, with the cudnn-frontend that the page of 26.06.01 blames for
# gpt-oss (issue 256).
_SLOW_BIAS_SUMS = (RecipePattern("gpt-oss", "gb[23]00", "mxfp8", since="26.06.01", before="26.08"),)
# `fp8_dot_product_attention`; Qwen3's, whose heads are of 128, takes as long in 8 bits.
_FP8_LATENT = (RecipePattern("deepseek-v3", "gb300", "mxfp8", since="26.06"),)
_FP8_WINDOWED = (RecipePattern("gpt-oss", "gb[23]00", "mxfp8", since="26.06"),)
# `fp8_output_proj`: deepseek_llm_pretrain.py, gpt_oss_llm_pretrain.py.
_NARROW_HEAD = (
    RecipePattern("deepseek-v3", "gb[23]00", "mxfp8", since="26.06"),
    RecipePattern("gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
)


def is_megatron_bridge(row: PublishedRow) -> bool:
    """Return True if the row is of a release of Megatron-Bridge."""
    return row.source == "NVIDIA-NeMo/Megatron-Bridge" and bool(row.release)


def is_nemo_deepseek(row: PublishedRow) -> bool:
    """Return True if NeMo 2.3 trained DeepSeek-V3 of dgxc-benchmarking (setup.sh, v25.05 to v25.07).

    Its scripts/performance/llm/pretrain_deepseek_v3.py drops tokens above a capacity, uses all-to-all, and overlaps no
    tensor collective.
    """
    return "deepseek-v3" in row.text("model").lower() and "dgxc-benchmarking@v25.0" in row.text("source_repo_path")


def lacks_fused_attention(row: PublishedRow) -> bool:
    """Return True for keys wider than values on a Blackwell before cuDNN 9.11.

    Transformer Engine then has no fused kernel for training (fused_attn.cpp, `nvte_get_fused_attn_backend`). The
    image of NeMo 25.04 is older.
    """
    return is_nemo_deepseek(row) and "h100" not in row.text("gpu").lower()


def uses_flash_attention_2(row: PublishedRow) -> bool:
    """Return True if FlashAttention 2 replaces cuDNN's kernel on an H100 (NVTE_FUSED_ATTN=0).

    This is so in NeMo's launcher up to 24.07 (launcher_scripts/conf/config.yaml), and in dgxc-benchmarking until
    25.02 for Grok and Nemotron 340B and in 24.11 for GPT-3 (configure.sh and launch.sh).
    """
    model, path = row.text("model").lower(), row.text("source_repo_path")
    if "h100" not in row.text("gpu").lower():
        return False
    if row.source == "NVIDIA/NeMo":
        image = re.search(r"container (\d\d\.\d\d)", row.text("note").lower())
        return image is None or image[1] <= "24.07"
    pattern = "grok|nemotron4-340b|gpt3" if "@v24.11" in path else "grok|nemotron4-340b"
    return re.search("dgxc-benchmarking@v(24.11|25.02)", path) is not None and re.search(pattern, model) is not None


def uses_delayed_scaling(row: PublishedRow) -> bool:
    """Return True for Transformer Engine of 2024, whose `DelayedScaling` takes more host time.

    NeMo's launcher and its images have it until 25.02.
    """
    path = r"dgxc-benchmarking@v(24|25\.02)|training_results_v4|NVIDIA/NeMo@"
    return re.search(path, row.text("source_repo_path")) is not None or _is_launcher_image(row)


def uses_megatron_fused_loss(row: PublishedRow) -> bool:
    """Return True if Megatron's fused loss is on, as in NeMo 2 (`cross_entropy_loss_fusion` of GPTConfig).

    LoRA of MLPerf turns it off (train.py).
    """
    path = r"dgxc-benchmarking@v25\.04|training_results_v5(?!.*lora)|NVIDIA/NeMo:.*long_sequence"
    return re.search(path, row.text("source_repo_path")) is not None and not _is_launcher_image(row)


def uses_te_fused_loss(row: PublishedRow) -> bool:
    """Return True if Transformer Engine's fused loss is on.

    scripts/performance of NeMo has it since April 2025, so dgxc-benchmarking since v25.05 (utils.py,
    `set_primary_perf_configs`: `cross_entropy_fusion_impl` "te").
    """
    return re.search(r"dgxc-benchmarking@v25\.0[5-9]", row.text("source_repo_path")) is not None


def gathers_fp8_parameters(row: PublishedRow) -> bool:
    """Return True if ZeRO gathers fp8 parameters.

    Megatron-Bridge does with one scale per tensor (mixed_precision.py, `fp8_param_gather`). Its mxfp8 gathers 16 bits
    (`reuse_grad_buf_for_mxfp8_param_ag`). dgxc-benchmarking does (`fp8_params` of configure.sh and of NeMo 2's
    bf16_with_fp8_mixed), and MLPerf v5.0 does (config_common.sh).
    """
    sources = is_megatron_bridge(row) or re.match("NVIDIA/dgxc|mlcommons/training_results_v5", row.source) is not None
    return sources and row.text("precision").lower() in ("fp8", "fp8-cs")


def _is_launcher_image(row: PublishedRow) -> bool:
    """Return True if an image of 2024 trained a row of 2025.

    These are Grok 1 and GPT-3 in dgxc-benchmarking v25.04 (24.12, grok1/launch.sh and nemo_megatron/launch.sh), and
    H100 on NeMo's page of long sequences (24.03.01).
    """
    text = " ".join(row.text(column) for column in ("source_repo_path", "model", "gpu"))
    return re.search("(?i)dgxc-benchmarking@v25.04.*(grok|gpt3)|long_sequence.*h100", text) is not None


def has_early_cudnn(row: PublishedRow) -> bool:
    """Return True for cuDNN of 2025 before 9.17. Megatron-Bridge has a later one since 26.02."""
    return _is_early_blackwell(row) or (is_megatron_bridge(row) and row.release < "26.02")


def has_dropout(row: PublishedRow) -> bool:
    """Return True if NeMo trained GPT-3, which has a dropout of 0.1
    (dgxc-benchmarking's nemo_megatron/gpt3_175b_hydra.yaml, the launcher's conf/training/gpt3/20b.yaml).
    """
    return row.source in ("NVIDIA/NeMo", "NVIDIA/dgxc-benchmarking") and "gpt3" in row.text("model").lower()


def has_mtp_layer(row: PublishedRow) -> bool:
    """Return True for recipes of DeepSeek-V3 with MTP (`mtp_num_layers` 1, NeMo's `use_mtp`)."""
    bridge = is_megatron_bridge(row) and re.search(r"deepseek-v3(?!.*w/o mtp)", row.text("model").lower()) is not None
    return bridge or is_nemo_deepseek(row)


def counts_embedding_as_layer(row: PublishedRow) -> bool:
    """Return True if embedding and loss count as layers in the pipeline split.

    NVIDIA's recipes for Llama 3.1 405B and Qwen3-235B do (`account_for_embedding_in_pipeline_split`), and a test of
    Megatron-LM does.
    """
    models = rf"405b|235b|{COUNTS_ENDS}"
    return row.source.startswith("NVIDIA") and re.search(models, row.text("model").lower()) is not None


def has_short_last_chunk(row: PublishedRow) -> bool:
    """Return True if the last pipeline chunk has fewer layers because of the head.

    Recipes of DeepSeek and Kimi do (`pipeline_model_parallel_layout`: 4 layers in each of 16 chunks except the last).
    """
    return is_megatron_bridge(row) and re.search("deepseek-v3|kimi", row.text("model").lower()) is not None


def get_stack_changes(row: PublishedRow) -> dict[str, Any]:
    """Return the constants of the stack that the recipe of a row changes."""
    early: dict[str, Any] = {"gemm_fp8": EARLY_BLACKWELL_FP8} if _is_early_blackwell(row) else {}
    if uses_megatron_fused_loss(row):
        early["loss"] = JOINED_LOSS
    if uses_te_fused_loss(row):
        early["loss"] = FUSED_LOSS
    if has_early_cudnn(row):
        early["attention_blackwell"] = EARLY_CUDNN_BLACKWELL
    if uses_delayed_scaling(row):
        early |= {"launch_s": DEFAULT_LAUNCH_S, "cast_s": EARLY_CAST_S}
    if uses_flash_attention_2(row):
        early["attention_hopper"] = CUDNN_HOPPER._replace(peak_factor=CUDNN_HOPPER.peak_factor * FLASH_2_FACTOR)
    if gathers_fp8_parameters(row):
        early["narrow_parameters"] = True
    if row.source == "NVIDIA/dgxc-benchmarking":
        return early | _get_dgxc_changes(row)
    if not is_megatron_bridge(row):
        return early
    megatron, changed = STACKS["megatron"], early | {"loss": FUSED_LOSS}  # `cross_entropy_fusion_impl`: "te"
    if (
        gathers_fp8_parameters(row) and "h100" in row.text("gpu").lower()
    ):  # a scale of now (mixed_precision.py, "tensorwise")
        changed["casts"] = megatron.casts * CURRENT_CASTS
    if has_mtp_layer(row):
        changed["head_passes"] = 2
    if matches_any(row, _FP8_LATENT):
        changed["attention"] = megatron.attention / FP8_LATENT_FACTOR
    if matches_any(row, _FP8_WINDOWED):
        changed["attention"] = megatron.attention / FP8_WINDOWED_FACTOR
    if matches_any(row, _SLOW_BIAS_SUMS):
        changed["bias_sums"] = SLOW_BIAS_SUMS
    if matches_any(row, _NARROW_HEAD):
        changed["narrow_head"] = True
    if uses_all_to_all(row):
        changed |= ALL_TO_ALL
    if matches_any(row, _DROPPING):
        changed["syncs_experts"] = False
    overlap = {} if row.text("precision").lower() == "nvfp4" else megatron.overlap
    if matches_any(row, _WHOLE) or (matches_any(row, _OVERLAPPED) and _sends_beyond_node(row)):
        overlap = {**overlap, **OVERLAPPED_EXPERTS}
    changed["overlap"] = overlap
    graphs = get_cuda_graphs(row)
    if graphs == "whole":
        return changed | WHOLE_GRAPH
    if graphs != "none":
        changed["launch_s"] = megatron.launch_s * GRAPHED[graphs]
    return changed


def get_cuda_graphs(row: PublishedRow) -> CudaGraphs:
    """Return the modules of a layer that are one CUDA graph, also for NeMo on GB200
    (nemotron/launch.sh, grok1/launch.sh: --cuda_graphs true).
    """
    if row.source == "NVIDIA/dgxc-benchmarking":
        graphed = row.text("gpu").lower().startswith("gb200")
        return "whole" if graphed and re.search("nemotron4|grok", row.text("model").lower()) else "none"
    if not is_megatron_bridge(row):
        return "none"
    if matches_any(row, _WHOLE + _LAYERS_WHOLE + _DENSE_WHOLE):
        return "whole"
    if matches_any(row, _ATTENTION):
        return "attention_and_router"
    return "router" if matches_any(row, _ROUTER) else "none"


def uses_all_to_all(row: PublishedRow) -> bool:
    """Return True if a recipe sends tokens to experts by all-to-all, also Grok 1 and DeepSeek-V3 of NeMo."""
    if is_megatron_bridge(row):
        return matches_any(row, _ALL_TO_ALL + _DROPPING)
    is_grok = row.source == "NVIDIA/dgxc-benchmarking" and "grok" in row.text("model").lower()
    return is_grok or is_nemo_deepseek(row)


def overlaps_experts(row: PublishedRow) -> bool:
    """Return True if Megatron-Bridge overlaps the all-to-all of one micro-batch with matmuls of another."""
    return is_megatron_bridge(row) and matches_any(row, _WHOLE + _OVERLAPPED)


def _sends_beyond_node(row: PublishedRow) -> bool:
    """Return True if tokens are sent to experts beyond NVLink.

    Within NVLink, the overlap gains nothing, because it needs more launches: gpt-oss on GB200 and Qwen3-235B on B300
    take equal time with and without it, within 2%.
    """
    return row.count("ep", 1) > (72 if row.text("gpu").lower().startswith("gb") else 8)


def _get_dgxc_changes(row: PublishedRow) -> dict[str, Any]:
    """Return changes of NeMo. Grok 1 without graphs runs experts one by one, with capacity and all-to-all
    (grok1/grok1_314b.yaml).
    """
    model, graphed = row.text("model").lower(), get_cuda_graphs(row) == "whole"
    changed: dict[str, Any] = {}
    if is_nemo_deepseek(row):
        changed |= ALL_TO_ALL | {"syncs_experts": False, "overlap": {}, "head_passes": 2}
    if graphed:
        changed |= WHOLE_GRAPH
    if "grok" in model:
        changed |= {"dispatches_per_node": False, "syncs_experts": False}
        if not graphed:
            changed["separate_experts"] = True
    return changed


def _is_early_blackwell(row: PublishedRow) -> bool:
    """Return True for the first Blackwell software of spring 2025.

    NeMo's page of long sequences names the image 25.04.rc2 (19fadb67).
    """
    path = r"dgxc-benchmarking@v25\.0[1-7]|training_results_v5\.0|NVIDIA/NeMo:.*long_sequence"
    of_spring = re.search(path, row.text("source_repo_path"))
    return of_spring is not None and re.search(r"b200", row.text("gpu").lower()) is not None


def matches_any(row: PublishedRow, recipes: tuple[RecipePattern, ...]) -> bool:
    """Return True if one of these recipes of pretraining matches the row."""
    return not row.is_fine_tuning and any(_matches(row, recipe) for recipe in recipes)


def _matches(row: PublishedRow, recipe: RecipePattern) -> bool:
    return (
        re.search(recipe.model, row.text("model").lower()) is not None
        and re.search(recipe.gpu, row.text("gpu").lower()) is not None
        and row.text("precision").lower().startswith(recipe.precision)
        and recipe.since <= row.release < recipe.before
        and recipe.pp in (None, row.count("pp"))
        and recipe.ep in (None, row.count("ep"))
        and recipe.gpus in (None, row.count("gpus"))
    )
