"""Settings of NVIDIA's release tags, for configurations without a published row and rows with missing sizes or
degrees.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.mapping import map_row
from benchmarks.published.mixtures import fill_sizes
from benchmarks.published.predict import Predictor
from benchmarks.published.recipes import get_stack_changes, uses_flash_attention_2
from benchmarks.published.recompute import RecipeRecompute, find_recompute
from benchmarks.published.rows import SkipError
from planner.hardware.stack_options import FUSED_LOSS, GRAPHED, JOINED_LOSS
from planner.hardware.stacks import STACKS
from tests.planner.rows.test_benchmark_published import ROW
from tests.planner.rows.test_recipes import _read_bridge_row, _read_row

UNTOLD = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
LONG = {"source_repo_path": "NVIDIA/NeMo:docs.md", "gpu": "B200", "model": "llama3.1-8b", "precision": "fp8"} | {
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "gpus": "1024",
    "tp": "4",
    "cp": "16",
    "dp": "16",
    "seq": "1048576",
    "global_batch": "4",
}


@pytest.mark.parametrize(
    ("release", "gpu", "model", "precision", "pp", "host"),
    [
        ("26.04", "B200", "llama3.1-8b", "NVFP4", "1", 1.0),
        ("26.04", "B200", "llama3.1-8b", "MXFP8", "1", 0.0),
        ("26.04", "GB300", "llama3.1-8b", "NVFP4", "1", 0.0),
        ("26.06", "GB200", "llama3.1-70b", "NVFP4", "4", 0.0),
        ("26.04.01", "B300", "deepseek-v3-671b", "MXFP8", "8", GRAPHED["attention_and_router"]),
        ("26.02", "GB300", "qwen3-235b-a22b", "BF16", "4", GRAPHED["router"]),
        ("26.02", "GB300", "qwen3-235b-a22b", "MXFP8", "4", GRAPHED["attention_and_router"]),
    ],
)
def test_cuda_graphs_follow_the_release_tag(
    tmp_path: Path, release: str, gpu: str, model: str, precision: str, pp: str, host: float
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, release, gpu, model, precision, pp=pp))
    assert changed.get("launch_s", STACKS["megatron"].launch_s) == host * STACKS["megatron"].launch_s


@pytest.mark.parametrize(
    ("release", "gpu", "model", "precision", "each"),
    [
        ("26.04.01", "GB200", "gpt-oss-120b", "MXFP8", True),
        ("26.06", "GB200", "gpt-oss-120b", "MXFP8", False),
        ("26.06.01", "B200", "qwen3-235b-a22b", "BF16", True),
        ("26.06.01", "B200", "qwen3-235b-a22b", "MXFP8", False),
    ],
)
def test_expert_dispatch_follows_the_release_tag(
    tmp_path: Path, release: str, gpu: str, model: str, precision: str, each: bool
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, release, gpu, model, precision, ep="64"))
    assert changed.get("sorts_dispatch", False) == each


@pytest.mark.parametrize(
    ("path", "late"),
    [
        ("NVIDIA/dgxc-benchmarking@v24.11.1:README.md", True),
        ("NVIDIA/dgxc-benchmarking@v25.02:README.md", True),
        ("NVIDIA/dgxc-benchmarking@v25.04:README.md", False),
        ("NVIDIA/NeMo@4c73f77670:docs.md", True),
        ("NVIDIA/NeMo:docs.md", False),
        ("mlcommons/training_results_v4.1:NVIDIA/results/eos_n32_ngc24.09_nemo/gpt3", True),
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", False),
    ],
)
def test_fp8_matmuls_take_more_host_time_with_software_of_2024(tmp_path: Path, path: str, late: bool) -> None:
    assert ("cast_s" in get_stack_changes(_read_row(tmp_path, **{**ROW, "source_repo_path": path}))) == late


@pytest.mark.parametrize(
    ("gpu", "precision", "casts"),
    [("H100", "FP8-CS", 1.5), ("H100", "BF16", 1), ("GB200", "FP8", 1), ("GB200", "MXFP8", 1)],
)
def test_current_scaling_computes_the_scale_before_the_cast(
    tmp_path: Path, gpu: str, precision: str, casts: float
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, "25.09", gpu, "llama3.1-8b", precision))
    assert changed.get("casts", STACKS["megatron"].casts) == pytest.approx(casts * STACKS["megatron"].casts)


@pytest.mark.parametrize(
    ("path", "loss"),
    [
        ("NVIDIA/dgxc-benchmarking@v25.02:README.md", STACKS["megatron"].loss),
        ("NVIDIA/dgxc-benchmarking@v25.04:README.md", JOINED_LOSS),
        ("NVIDIA/dgxc-benchmarking@v25.05.04:README.md", FUSED_LOSS),
        ("mlcommons/training_results_v4.1:NVIDIA/results/x", STACKS["megatron"].loss),
        ("mlcommons/training_results_v5.0:NVIDIA/results/x/llama31_405b", JOINED_LOSS),
        ("mlcommons/training_results_v5.0:NVIDIA/results/x/llama2_70b_lora", STACKS["megatron"].loss),
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", FUSED_LOSS),
    ],
)
def test_loss_kernel_follows_the_recipe_software(tmp_path: Path, path: str, loss: float) -> None:
    row = _read_bridge_row(tmp_path, "26.04", "H100", "llama3.1-70b", "FP8", source_repo_path=path)
    assert get_stack_changes(row).get("loss", STACKS["megatron"].loss) == loss


@pytest.mark.parametrize(
    ("path", "gpu", "model", "late"),
    [
        ("NVIDIA/dgxc-benchmarking@v25.04:README.md", "H100", "grok1-314b", True),
        ("NVIDIA/dgxc-benchmarking@v25.04:README.md", "H100", "gpt3-175b", True),
        ("NVIDIA/NeMo:performance_long_sequence.md", "H100", "llama2-7b", True),
        ("NVIDIA/NeMo:performance_long_sequence.md", "B200", "llama3.1-8b", False),
    ],
)
def test_models_of_the_nemo_launcher_use_software_of_2024(
    tmp_path: Path, path: str, gpu: str, model: str, late: bool
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, "26.04", gpu, model, "FP8", source_repo_path=path))
    assert ("cast_s" in changed) == late
    assert ("loss" in changed) != late


@pytest.mark.parametrize(
    ("path", "precision", "narrow"),
    [
        ("NVIDIA/dgxc-benchmarking@v24.11.1:README.md", "fp8", True),
        ("NVIDIA/dgxc-benchmarking@v25.05.04:README.md", "bf16", False),
        ("mlcommons/training_results_v5.0:NVIDIA/results/x/llama31_405b", "fp8", True),
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", "FP8-CS", True),
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", "MXFP8", False),
    ],
)
def test_fp8_gathers_of_zero_follow_the_recipe(tmp_path: Path, path: str, precision: str, narrow: bool) -> None:
    changed = get_stack_changes(
        _read_bridge_row(tmp_path, "26.04", "GB200", "llama3.1-405b", precision, source_repo_path=path)
    )
    assert changed.get("narrow_parameters", False) == narrow


@pytest.mark.parametrize(("gpus", "repeated"), [("128", RecipeRecompute(layers=1.0)), ("256", RecipeRecompute())])
def test_larger_of_two_recipe_sizes_recomputes_nothing(tmp_path: Path, gpus: str, repeated: RecipeRecompute) -> None:
    assert find_recompute(_read_bridge_row(tmp_path, "26.02", "GB200", "llama3.1-405b", "NVFP4", gpus=gpus)) == repeated


@pytest.mark.parametrize(
    ("model", "layers", "experts"),
    [("qwen3-30b-a3b (tokendrop)", 48, 128), ("deepseek-v3-671b (w/o MTP)", 61, 256), ("gpt-oss-20b", 24, 32)],
)
def test_known_model_fills_missing_sizes(tmp_path: Path, model: str, layers: int, experts: int) -> None:
    row = _read_bridge_row(tmp_path, "25.11", "B200", model, "BF16", tp="1", dp="64", ep="8", **UNTOLD)
    planned = map_row(row).spec.model
    assert planned.moe is not None
    assert (planned.num_layers, planned.moe.num_experts) == (layers, experts)


@pytest.mark.parametrize("model", ["DeepSeekV4 Flash", "deepseek-v3.2", "qwen3-vl-30b-a3b"])
def test_other_model_generation_fills_no_sizes(tmp_path: Path, model: str) -> None:
    row = _read_row(tmp_path, **ROW | UNTOLD | {"model": model})
    assert fill_sizes(row) is row
    with pytest.raises(SkipError, match="no hidden"):
        map_row(row)


def test_listed_degrees_apply_if_their_product_differs_from_the_gpus(tmp_path: Path) -> None:
    """Use the context ranks that the table lists."""
    layout = map_row(_read_row(tmp_path, **ROW | LONG | {"note": "dp as listed 4"})).spec.layout
    assert (layout.dp, layout.cp, layout.world_size) == (4, 16, 256)
    with pytest.raises(SkipError, match="fewer sequences"):
        map_row(_read_row(tmp_path, **ROW | LONG))


@pytest.mark.parametrize(("image", "found"), [("container 24.07", True), ("container 24.12", False), ("", True)])
def test_later_nemo_images_run_cudnn_attention(tmp_path: Path, image: str, found: bool) -> None:
    row = {"source_repo_path": "NVIDIA/NeMo:docs.md", "gpu": "H100-SXM5-80GB", "note": image}
    assert uses_flash_attention_2(_read_row(tmp_path, **ROW | row)) == found


@pytest.mark.parametrize(("model", "experts", "dense"), [("llama4-maverick", 128, 24), ("llama4-scout", 16, 0)])
def test_every_second_layer_of_llama_4_maverick_has_experts(
    tmp_path: Path, model: str, experts: int, dense: int
) -> None:
    sizes = {"layers": "48", "hidden": "5120", "heads": "40", "kv_heads": "8", "ffn": "8192"}
    moe = map_row(_read_row(tmp_path, **ROW | sizes | {"model": model, "ep": "16"})).spec.model.moe
    assert moe is not None
    assert (moe.num_experts, moe.dense_layers, moe.shared_experts) == (experts, dense, 1)


def test_adapters_freeze_weights_without_gradients_or_moments(tmp_path: Path) -> None:
    """Llama 70B on 8 GB200 keeps 16-bit weights and 8-bit replicas.

    18 B per parameter would need 158 of 186 GB per rank.
    """
    sizes = {"layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "8", "ffn": "28672"}
    row = sizes | {"gpus": "8", "tp": "1", "pp": "4", "vpp": "20", "dp": "2", "seq": "4096", "global_batch": "32"}
    tasks = ("LoRA Performance", "SFT Performance")
    lora, sft = (
        _read_bridge_row(tmp_path, "26.06", "GB200", "llama3.1-70b", "MXFP8", **row, note=f"26.06 {task}")
        for task in tasks
    )
    assert map_row(lora).kernels.freezes_weights
    assert not map_row(sft).kernels.freezes_weights
    assert (Predictor().predict(lora).fits, Predictor().predict(sft).fits) == (True, False)


@pytest.mark.parametrize(("task", "layers"), [("Pre-Training", 5 / 32), ("SFT", 0.0), ("LoRA", 0.0)])
def test_pretraining_recipe_does_not_apply_to_fine_tuning(tmp_path: Path, task: str, layers: float) -> None:
    note = f"25.11 {task} Performance"
    row = _read_bridge_row(tmp_path, "25.11", "H100-SXM5-80GB", "llama3.1-8b", "FP8-CS", note=note)
    assert (row.release, find_recompute(row)) == ("25.11", RecipeRecompute(layers=layers))


@pytest.mark.parametrize(
    ("source", "divided"),
    [
        ("bigscience-workshop/bigscience:chronicles.md", True),
        ("NVIDIA/NeMo:docs.md", False),
        ("Aleph-Alpha/layouts:runs.xlsx", False),
    ],
)
def test_stage_boundary_is_divided_if_the_source_divides_it(tmp_path: Path, source: str, divided: bool) -> None:
    """Recent Megatron uses sequence parallelism, so each tensor rank has its shard."""
    piped = {"source_repo_path": source, "pp": "2", "dp": "16", "note": ""}
    layout = map_row(_read_row(tmp_path, **ROW | piped)).spec.layout
    assert (layout.scatter_gather, layout.sequence_parallel) == (divided, source.startswith("NVIDIA"))
