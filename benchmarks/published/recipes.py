"""What NVIDIA's recipes for mixtures switch on by release, as their repository's tags have it.

Megatron-Bridge, scripts/performance/configs/*/*_workload_base_configs.py: v0.1.0 is release 25.09, v0.2.0 25.11, v0.3.0
26.02, v0.3.1 26.02.01, v0.4.0 26.04, v0.4.2 26.04.01, v0.5.0 26.06, v0.5.1 26.06.01. `moe_a2a_overlap` sends one
micro-batch's tokens beside the products of another; `cutedsl_fused_grouped_mlp` computes an expert's MLP in one kernel,
with the whole iteration in a CUDA graph; `cuda_graph_scope` names the modules that are one otherwise.
dgxc-benchmarking: its launch scripts by tag.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from benchmarks.published.own_tests import COUNTS_ENDS
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


class Recipes(NamedTuple):
    """Patterns of a model and of an accelerator, a precision as it begins, releases `since` and `before`."""

    model: str
    gpu: str
    precision: str
    since: str = ""
    before: str = "99"
    pp: int | None = None
    ep: int | None = None
    gpus: int | None = None


_OVERLAPPED = (
    Recipes("qwen3-235b", "h100", "", since="25.11"),
    Recipes("qwen3-235b", r"\bb200", "", since="25.11", before="26.02"),
    Recipes("qwen3-235b", r"\bb300", "", before="26.02.01"),
    Recipes("qwen3-30b", "h100", "", since="25.11", before="26.02.01"),
    Recipes("gpt-oss-120b", "gb200", "bf16", since="26.04"),
    Recipes("gpt-oss-120b", "gb200", "mxfp8", since="26.04"),
    Recipes("deepseek-v3", r"\bb200", "mxfp8", pp=8),
    Recipes("deepseek-v3", r"\bb200", "nvfp4", pp=8),
    Recipes("deepseek-v3", "h100", "", before="26.02"),
)
# Without `moe_flex_dispatcher_backend`, or with `moe_token_dispatcher_type` "alltoall" beside it: qwen3_llm_pretrain.py
# for B200, B300 and H100; gpt_oss_llm_pretrain.py, which reads the first from v0.4.0 on.
_ALL_TO_ALL = (
    Recipes("gpt-oss", "h100", ""),
    Recipes("gpt-oss", "gb300", "bf16"),
    Recipes("gpt-oss", "gb300", "", before="26.06"),
    Recipes("gpt-oss", "gb200", "", before="26.04"),
    Recipes("gpt-oss", "gb200", "bf16", since="26.04.01"),
    Recipes("gpt-oss", "gb200", "mxfp8", since="26.04.01", before="26.06"),
    Recipes("gpt-oss", r"\bb[23]00", "", ep=64),
    Recipes("gpt-oss", r"\bb200", "", since="26.04.01"),
    Recipes("qwen3-235b", "h100", ""),
    Recipes("qwen3-235b", r"\bb200", "", before="26.06.01"),
    Recipes("qwen3-235b", r"\bb200", "bf16"),
    Recipes("qwen3-235b", r"\bb200", "fp8"),
    Recipes("qwen3-235b", r"\bb200", "nvfp4"),
    Recipes("qwen3-235b", r"\bb300", "", before="26.04.01"),
    Recipes("qwen3-30b", r"\bb200", "", before="26.02.01"),
    Recipes("qwen3-30b", "h100", "", before="26.02"),
    Recipes("deepseek-v3", r"\bb200", "", before="26.02"),
)
# Tokens beyond a capacity are dropped, and sent by all-to-all: v0.1.0's run_script.py (`apply_moe_token_drop`).
_DROPPING = (
    Recipes("qwen3", "", "", before="25.11"),
    Recipes("deepseek-v3", "b200", "", before="25.11"),
)
_WHOLE = (
    Recipes("deepseek-v3|qwen3|gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
    Recipes("qwen3-30b", "b300", "mxfp8", since="26.06"),
    Recipes("qwen3", r"\bb[23]00", "mxfp8", since="26.06.01"),
    Recipes("deepseek-v3", r"\bb300", "mxfp8", since="26.06.01"),
)
# v0.1.0's `cuda_graphs`: of whole layers, which drop tokens.
_LAYERS_WHOLE = (
    Recipes("qwen3", "gb200", "", before="25.11"),
    Recipes("qwen3-30b", r"\bb200", "", before="25.11"),
)
_ATTENTION = (
    Recipes("deepseek-v3", "gb200", "", since="26.02"),
    Recipes("qwen3-235b", "gb200", ""),
    Recipes("deepseek-v3", "gb300", "bf16"),
    Recipes("deepseek-v3", "gb300", "", before="26.02"),
    Recipes("deepseek-v3", r"\bb300", "", since="26.04.01"),
    Recipes("deepseek-v3", r"\bb200", "mxfp8", pp=8),
    Recipes("gpt-oss-120b", "b300", ""),
    Recipes("qwen3-235b", "gb300", "", since="26.02.01", pp=4),
    Recipes("qwen3-235b", "gb300", "fp8", pp=4),
    Recipes("qwen3-235b", "gb300", "mxfp8", pp=4),
    Recipes("qwen3-30b", "gb200", "bf16"),
    Recipes("qwen3-30b", "gb200", "fp8"),
    Recipes("qwen3-30b", r"\bb200", "", since="26.02.01"),
)
_ROUTER = (
    Recipes("qwen3", "gb300", ""),
    Recipes("qwen3-30b", "b[23]00", ""),
    Recipes("qwen3-30b", "h100", "bf16"),
    Recipes("deepseek-v3", "gb200", "", since="25.11"),
    Recipes("kimi-k2", "gb200", ""),
)
_DENSE_WHOLE = (
    Recipes("llama3.*-8b", "b[23]00", "bf16"),
    Recipes("llama3.*-8b", "b[23]00", "fp8"),
    Recipes("llama3.*-8b", "b[23]00", "mxfp8"),
    Recipes("llama3.*-8b", "gb300", "nvfp4"),
    Recipes("llama3.*-70b", "gb200", "nvfp4", since="26.06"),
    Recipes("llama3.*-70b", r"\bb200", "bf16"),
)
# `cutedsl_fused_grouped_mlp` of experts that have biases, with the cudnn-frontend that the page of 26.06.01 blames for
# gpt-oss (issue 256).
_SLOW_BIAS_SUMS = (Recipes("gpt-oss", "gb[23]00", "mxfp8", since="26.06.01", before="26.08"),)
# `fp8_dot_product_attention`; Qwen3's, whose heads are of 128, takes as long in 8 bits.
_FP8_LATENT = (Recipes("deepseek-v3", "gb300", "mxfp8", since="26.06"),)
_FP8_WINDOWED = (Recipes("gpt-oss", "gb[23]00", "mxfp8", since="26.06"),)
# `fp8_output_proj`: deepseek_llm_pretrain.py, gpt_oss_llm_pretrain.py.
_NARROW_HEAD = (
    Recipes("deepseek-v3", "gb[23]00", "mxfp8", since="26.06"),
    Recipes("gpt-oss", "gb[23]00", "mxfp8", since="26.06"),
)


def of_bridge(row: PublishedRow) -> bool:
    """Whether the row is of a release of Megatron-Bridge."""
    return row.source == "NVIDIA-NeMo/Megatron-Bridge" and bool(row.release)


def of_nemo_deepseek(row: PublishedRow) -> bool:
    """Whether a row is of dgxc-benchmarking's DeepSeek-V3 while NeMo 2.3 trained it (its setup.sh, v25.05 to v25.07):
    scripts/performance/llm/pretrain_deepseek_v3.py drops tokens beyond a capacity, sends them by all-to-all, and
    overlaps no tensor collective."""
    return "deepseek-v3" in row.text("model").lower() and "dgxc-benchmarking@v25.0" in row.text("source_repo_path")


def lacks_fused_attention(row: PublishedRow) -> bool:
    """Whether keys are wider than values on a Blackwell before cuDNN 9.11, where Transformer Engine has no fused kernel
    that trains (fused_attn.cpp, `nvte_get_fused_attn_backend`); NeMo 25.04's image is older."""
    return of_nemo_deepseek(row) and "h100" not in row.text("gpu").lower()


def runs_flash_2(row: PublishedRow) -> bool:
    """Whether FlashAttention 2 stands for cuDNN's on an H100 (NVTE_FUSED_ATTN=0): in NeMo's launcher up to 24.07
    (launcher_scripts/conf/config.yaml), in dgxc-benchmarking until 25.02 for Grok and Nemotron 340B, and for GPT-3 in
    24.11 (their configure.sh and launch.sh)."""
    model, path = row.text("model").lower(), row.text("source_repo_path")
    if "h100" not in row.text("gpu").lower():
        return False
    if row.source == "NVIDIA/NeMo":
        image = re.search(r"container (\d\d\.\d\d)", row.text("note").lower())
        return image is None or image[1] <= "24.07"
    pattern = "grok|nemotron4-340b|gpt3" if "@v24.11" in path else "grok|nemotron4-340b"
    return re.search("dgxc-benchmarking@v(24.11|25.02)", path) is not None and re.search(pattern, model) is not None


def casts_late(row: PublishedRow) -> bool:
    """Whether Transformer Engine is one of 2024's, whose modules scale with what was largest before (`DelayedScaling`)
    and take their host longer: NeMo's launcher and its images until 25.02."""
    path = r"dgxc-benchmarking@v(24|25\.02)|training_results_v4|NVIDIA/NeMo@"
    return re.search(path, row.text("source_repo_path")) is not None or _of_launcher(row)


def joins_loss(row: PublishedRow) -> bool:
    """Whether Megatron's own fused loss is on, by NeMo 2's default (`cross_entropy_loss_fusion` of its GPTConfig). LoRA
    of MLPerf turns it off (train.py)."""
    path = r"dgxc-benchmarking@v25\.04|training_results_v5(?!.*lora)|NVIDIA/NeMo:.*long_sequence"
    return re.search(path, row.text("source_repo_path")) is not None and not _of_launcher(row)


def fuses_loss(row: PublishedRow) -> bool:
    """Whether Transformer Engine's loss is, as scripts/performance of NeMo has it from April 2025 on, of which
    dgxc-benchmarking's v25.05 is the first release (utils.py, `set_primary_perf_configs`: `cross_entropy_fusion_impl`
    "te")."""
    return re.search(r"dgxc-benchmarking@v25\.0[5-9]", row.text("source_repo_path")) is not None


def gathers_narrow(row: PublishedRow) -> bool:
    """Whether ZeRO gathers fp8: with Megatron-Bridge's one scale a tensor (mixed_precision.py, `fp8_param_gather`; that
    of mxfp8 is 16 bits, `reuse_grad_buf_for_mxfp8_param_ag`), in dgxc-benchmarking (`fp8_params` of its configure.sh
    and of NeMo 2's bf16_with_fp8_mixed) and in MLPerf's v5.0 (config_common.sh)."""
    sources = of_bridge(row) or re.match("NVIDIA/dgxc|mlcommons/training_results_v5", row.source) is not None
    return sources and row.text("precision").lower() in ("fp8", "fp8-cs")


def _of_launcher(row: PublishedRow) -> bool:
    """Whether an image of 2024 trained what a page of 2025 has: Grok 1 and GPT-3 in dgxc-benchmarking's v25.04 (24.12,
    its grok1/launch.sh and nemo_megatron/launch.sh), H100 on NeMo's page of long sequences (24.03.01)."""
    text = " ".join(row.text(column) for column in ("source_repo_path", "model", "gpu"))
    return re.search("(?i)dgxc-benchmarking@v25.04.*(grok|gpt3)|long_sequence.*h100", text) is not None


def has_early_cudnn(row: PublishedRow) -> bool:
    """Whether cuDNN is one of 2025's, before 9.17: Megatron-Bridge's releases from 26.02 on have a later one."""
    return _is_early_blackwell(row) or (of_bridge(row) and row.release < "26.02")


def drops_out(row: PublishedRow) -> bool:
    """Whether NeMo trained GPT-3, a tenth of whose activations it drops out (dgxc-benchmarking's
    nemo_megatron/gpt3_175b_hydra.yaml, its launcher's conf/training/gpt3/20b.yaml)."""
    return row.source in ("NVIDIA/NeMo", "NVIDIA/dgxc-benchmarking") and "gpt3" in row.text("model").lower()


def predicts_second(row: PublishedRow) -> bool:
    """Whether the model predicts a second token: DeepSeek-V3's recipes, `mtp_num_layers` 1 and NeMo's `use_mtp`."""
    bridge = of_bridge(row) and re.search(r"deepseek-v3(?!.*w/o mtp)", row.text("model").lower()) is not None
    return bridge or of_nemo_deepseek(row)


def counts_ends(row: PublishedRow) -> bool:
    """Whether embedding and loss stand for a layer each where a pipe is divided: NVIDIA's recipes for Llama 3.1 405B
    and Qwen3-235B (`account_for_embedding_in_pipeline_split`), and a test of Megatron-LM's."""
    models = rf"405b|235b|{COUNTS_ENDS}"
    return row.source.startswith("NVIDIA") and re.search(models, row.text("model").lower()) is not None


def divides_by_cost(row: PublishedRow) -> bool:
    """Whether the last of a pipe's chunks has fewer layers, for the head's sake: DeepSeek's and Kimi's recipes
    (`pipeline_model_parallel_layout`: 4 layers in each of 16 chunks but the last)."""
    return of_bridge(row) and re.search("deepseek-v3|kimi", row.text("model").lower()) is not None


def switched_on(row: PublishedRow) -> dict[str, Any]:
    """Constants of the stack that a row's recipe changes."""
    early: dict[str, Any] = {"gemm_fp8": EARLY_BLACKWELL_FP8} if _is_early_blackwell(row) else {}
    if joins_loss(row):
        early["loss"] = JOINED_LOSS
    if fuses_loss(row):
        early["loss"] = FUSED_LOSS
    if has_early_cudnn(row):
        early["attention_blackwell"] = EARLY_CUDNN_BLACKWELL
    if casts_late(row):
        early |= {"launch_s": DEFAULT_LAUNCH_S, "cast_s": EARLY_CAST_S}
    if runs_flash_2(row):
        early["attention_hopper"] = CUDNN_HOPPER._replace(peak_factor=CUDNN_HOPPER.peak_factor * FLASH_2_FACTOR)
    if gathers_narrow(row):
        early["narrow_parameters"] = True
    if row.source == "NVIDIA/dgxc-benchmarking":
        return early | _of_dgxc(row)
    if not of_bridge(row):
        return early
    megatron, changed = STACKS["megatron"], early | {"loss": FUSED_LOSS}  # `cross_entropy_fusion_impl`: "te"
    if gathers_narrow(row) and "h100" in row.text("gpu").lower():  # a scale of now (mixed_precision.py, "tensorwise")
        changed["casts"] = megatron.casts * CURRENT_CASTS
    if predicts_second(row):
        changed["head_passes"] = 2
    if any_of(row, _FP8_LATENT):
        changed["attention"] = megatron.attention / FP8_LATENT_FACTOR
    if any_of(row, _FP8_WINDOWED):
        changed["attention"] = megatron.attention / FP8_WINDOWED_FACTOR
    if any_of(row, _SLOW_BIAS_SUMS):
        changed["bias_sums"] = SLOW_BIAS_SUMS
    if any_of(row, _NARROW_HEAD):
        changed["narrow_head"] = True
    if sends_to_all(row):
        changed |= ALL_TO_ALL
    if any_of(row, _DROPPING):
        changed["syncs_experts"] = False
    hidden = {} if row.text("precision").lower() == "nvfp4" else megatron.overlap
    if any_of(row, _WHOLE) or (any_of(row, _OVERLAPPED) and _leaves_node(row)):
        hidden = {**hidden, **OVERLAPPED_EXPERTS}
    changed["overlap"] = hidden
    graphs = graphs_of(row)
    if graphs == "whole":
        return changed | WHOLE_GRAPH
    if graphs != "none":
        changed["launch_s"] = megatron.launch_s * GRAPHED[graphs]
    return changed


def graphs_of(row: PublishedRow) -> CudaGraphs:
    """What of a layer is one CUDA graph; in NeMo's on GB200 too (nemotron/launch.sh, grok1/launch.sh: --cuda_graphs
    true)."""
    if row.source == "NVIDIA/dgxc-benchmarking":
        graphed = row.text("gpu").lower().startswith("gb200")
        return "whole" if graphed and re.search("nemotron4|grok", row.text("model").lower()) else "none"
    if not of_bridge(row):
        return "none"
    if any_of(row, _WHOLE + _LAYERS_WHOLE + _DENSE_WHOLE):
        return "whole"
    if any_of(row, _ATTENTION):
        return "attention_and_router"
    return "router" if any_of(row, _ROUTER) else "none"


def sends_to_all(row: PublishedRow) -> bool:
    """Whether a recipe's tokens reach experts by all-to-all, in Grok 1 and DeepSeek-V3 of NeMo too."""
    if of_bridge(row):
        return any_of(row, _ALL_TO_ALL + _DROPPING)
    is_grok = row.source == "NVIDIA/dgxc-benchmarking" and "grok" in row.text("model").lower()
    return is_grok or of_nemo_deepseek(row)


def overlaps_experts(row: PublishedRow) -> bool:
    """Whether a recipe of Megatron-Bridge sends one micro-batch's tokens beside another's products."""
    return of_bridge(row) and any_of(row, _WHOLE + _OVERLAPPED)


def _leaves_node(row: PublishedRow) -> bool:
    """Whether tokens go to experts beyond NVLink. Where they do not, sending them beside products gains nothing that
    launching it in so many more pieces does not take: what gpt-oss on GB200 and Qwen3-235B on B300 take with it is
    what they take without, to 2%."""
    return row.count("ep", 1) > (72 if row.text("gpu").lower().startswith("gb") else 8)


def _of_dgxc(row: PublishedRow) -> dict[str, Any]:
    """NeMo's. Grok 1 where nothing is a graph: each expert by itself, buffers of a capacity, tokens sent by all-to-all
    (grok1/grok1_314b.yaml)."""
    model, graphed = row.text("model").lower(), graphs_of(row) == "whole"
    changed: dict[str, Any] = {}
    if of_nemo_deepseek(row):
        changed |= ALL_TO_ALL | {"syncs_experts": False, "overlap": {}, "head_passes": 2}
    if graphed:
        changed |= WHOLE_GRAPH
    if "grok" in model:
        changed |= {"dispatches_per_node": False, "syncs_experts": False}
        if not graphed:
            changed["separate_experts"] = True
    return changed


def _is_early_blackwell(row: PublishedRow) -> bool:
    """Whether a row is of the first software for Blackwell, of spring 2025; NeMo's page of long sequences names the
    image 25.04.rc2 (19fadb67)."""
    path = r"dgxc-benchmarking@v25\.0[1-7]|training_results_v5\.0|NVIDIA/NeMo:.*long_sequence"
    of_spring = re.search(path, row.text("source_repo_path"))
    return of_spring is not None and re.search(r"b200", row.text("gpu").lower()) is not None


def any_of(row: PublishedRow, recipes: tuple[Recipes, ...]) -> bool:
    """Whether one of these, which are all of models trained from their beginning, is the row's."""
    return not row.tunes and any(_is(row, recipe) for recipe in recipes)


def _is(row: PublishedRow, recipe: Recipes) -> bool:
    return (
        re.search(recipe.model, row.text("model").lower()) is not None
        and re.search(recipe.gpu, row.text("gpu").lower()) is not None
        and row.text("precision").lower().startswith(recipe.precision)
        and recipe.since <= row.release < recipe.before
        and recipe.pp in (None, row.count("pp"))
        and recipe.ep in (None, row.count("ep"))
        and recipe.gpus in (None, row.count("gpus"))
    )
