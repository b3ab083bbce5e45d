"""Recompute, offload and second-token prediction of NVIDIA's recipes, with their cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published.extra_memory import compute_megatron_memory
from benchmarks.published.mapping import MappedRow, map_row
from benchmarks.published.megatron_tests import MUON_KERNELS, SHA1_BYTES_PER_S
from benchmarks.published.recipes import get_stack_changes, has_mtp_layer, lacks_fused_attention
from benchmarks.published.recompute import RecipeRecompute, find_recompute
from benchmarks.published.rows import PublishedRow, SkipError, read_rows
from planner.cost.memory import count_held_parameters, get_stage_memory
from planner.cost.resolved_plan import resolve
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.facts.model_parts import MlaSpec
from planner.facts.presets import PRESETS
from planner.facts.resources import Resources
from planner.facts.spec import JobSpec, Layout, Recompute, TrainSpec
from planner.facts.stages import get_stage_chunks
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.kernel_time import (
    CUDNN_HOPPER,
    EARLY_CUDNN_BLACKWELL,
    FLASH_2_FACTOR,
    FP8_LATENT_FACTOR,
    FP8_WINDOWED_FACTOR,
)
from planner.hardware.kernels import Gemm, MemoryKernel, build_head_kernels, build_layer_kernels
from planner.hardware.stack_options import FUSED_LOSS, SLOW_BIAS_SUMS
from planner.hardware.stacks import STACKS
from tests.planner.rows.test_benchmark_published import DGXC, OWN, ROW, write_rows

BRIDGE = {**ROW, "source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "recompute": "see recipe"}
TRAIN = TrainSpec(global_batch=256, micro_batches=4, seq_len=4096, precision="fp8")
SPEC = JobSpec(
    model=PRESETS["llama3-8b"].model,
    layout=Layout(dp=64, zero=1),
    train=TRAIN,
    resources=Resources(device="cuda", stack="megatron"),
)
GB200 = CLUSTERS["gb200"]
APART = "no-gradient-accumulation-fusion=True"


def _read_row(tmp_path: Path, **row: str) -> PublishedRow:
    (read,) = read_rows(write_rows(tmp_path / "rows.csv", row))
    assert not isinstance(read, SkipError)
    return read


def _read_bridge_row(tmp_path: Path, release: str, gpu: str, model: str, precision: str, **more: str) -> PublishedRow:
    kind = {"gpu": gpu, "model": model, "precision": precision, "note": f"{release} Pre-Training Performance"}
    return _read_row(tmp_path, **BRIDGE | kind | more)


@pytest.mark.parametrize(
    ("row", "repeated"),
    [
        (("26.04", "GB300", "llama3.1-405b", "MXFP8"), RecipeRecompute()),
        (("26.04", "GB300", "qwen3-30b-a3b", "MXFP8"), RecipeRecompute()),
        (("26.02", "GB200", "gpt-oss-120b", "BF16"), RecipeRecompute(("norms", "activation"))),
        (("26.02", "GB300", "gpt-oss-120b", "BF16"), RecipeRecompute()),
        (("25.11", "GB300", "deepseek-v3-671b", "MXFP8"), RecipeRecompute(("activation",))),
        (("26.02", "GB300", "deepseek-v3-671b", "MXFP8"), RecipeRecompute(("latents",))),
        (("26.06", "GB300", "deepseek-v3-671b", "MXFP8"), RecipeRecompute()),
        (("26.04", "GB200", "deepseek-v3-671b", "MXFP8"), RecipeRecompute(("mlp",))),
        (("25.11", "H100-SXM5-80GB", "deepseek-v3-671b", "FP8-CS"), RecipeRecompute(("latents", "mlp"))),
        (("25.11", "H100-SXM5-80GB", "llama3.1-8b", "FP8-CS"), RecipeRecompute(layers=5 / 32)),
        (("26.02", "B200", "llama3.1-405b", "NVFP4"), RecipeRecompute(layers=1.0)),
    ],
)
def test_recompute_follows_the_release_tag(
    tmp_path: Path, row: tuple[str, str, str, str], repeated: RecipeRecompute
) -> None:
    assert find_recompute(_read_bridge_row(tmp_path, *row)) == repeated


def test_sharded_llamas_offload_layers_and_recompute_none(tmp_path: Path) -> None:
    row = _read_bridge_row(tmp_path, "26.02", "GB200", "llama3.1-70b", "FP8", zero="3", layers="80", tp="1", dp="64")
    assert find_recompute(row) == RecipeRecompute(offloaded=0.5)
    planned = map_row(row)
    assert (planned.spec.layout.recompute, planned.kernels.offload_fraction) == ("none", 0.5)
    assert (planned.any_recompute, planned.usual_recompute) == (True, False)
    assert find_recompute(_read_row(tmp_path, **ROW)) is None


def _timed(recompute: Recompute = "selective", spec: JobSpec = SPEC, **changed: object) -> Timing:
    spec = spec.model_copy(update={"layout": spec.layout.model_copy(update={"recompute": recompute})})
    return Timer(GB200, {"megatron": STACKS["megatron"]._replace(**changed)}).get_step(spec)


def test_only_named_modules_are_recomputed() -> None:
    latent = MlaSpec(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128)
    spec = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"mla": latent})})
    up = [
        k
        for k in build_layer_kernels(spec, fused_projections=True, recompute_modules=("latents",)).recomputed
        if isinstance(k, Gemm)
    ]
    assert [(g.n, g.k) for g in up] == [(32 * 192, 1536), (32 * 256, 512)]
    assert build_layer_kernels(spec, fused_projections=True, recompute_modules=()).recomputed == ()
    mlp = [
        k
        for k in build_layer_kernels(SPEC, fused_projections=True, recompute_modules=("mlp",)).recomputed
        if isinstance(k, Gemm)
    ]
    assert [(g.n, g.k) for g in mlp] == [(2 * 14336, 4096), (4096, 14336)]
    apart = [_timed(recompute_modules=(name,)).recompute_s for name in ("norms", "activation")]
    assert sum(apart) == pytest.approx(_timed().recompute_s)
    assert _timed("full", recompute_fraction=0.25).recompute_s == pytest.approx(_timed("full").recompute_s / 4)


def test_query_and_key_norms_run_as_separate_kernels() -> None:
    """Norm 32 query heads and 8 key heads of 128 in 2 bytes. The backward also reads the gradient."""
    usual, normed = (build_layer_kernels(SPEC, normalizes_heads=norms) for norms in (False, True))
    size = SPEC.micro_batch_size * TRAIN.seq_len * (32 + 8) * 128 * 2
    for half, times in (("forward", 2), ("backward_input", 3)):
        works = [getattr(work, half) for work in (usual, normed)]
        moved = [sum(k.num_bytes for k in part if isinstance(k, MemoryKernel) and k.kind == "norm") for part in works]
        assert moved[1] - moved[0] == times * size
        assert len(works[1]) - len(works[0]) == 2


@pytest.mark.parametrize(
    ("row", "ep", "hides"),
    [
        (("26.02", "B300", "qwen3-235b-a22b", "MXFP8"), "8", False),  # within a node
        (("26.04", "GB200", "gpt-oss-120b", "BF16"), "64", False),  # of 72
        (("26.04", "B200", "gpt-oss-120b", "BF16"), "64", False),  # the recipe has no overlap
        (("25.11", "H100-SXM5-80GB", "qwen3-235b-a22b", "FP8-CS"), "32", True),
        (("26.06", "GB300", "qwen3-30b-a3b", "MXFP8"), "8", True),  # one CUDA graph
    ],
)
def test_expert_overlap_gains_across_nodes_or_in_one_graph(
    tmp_path: Path, row: tuple[str, str, str, str], ep: str, hides: bool
) -> None:
    assert ("ep" in get_stack_changes(_read_bridge_row(tmp_path, *row, ep=ep))["overlap"]) == hides


def test_loss_kernel_of_transformer_engine_moves_a_third_of_the_bytes(tmp_path: Path) -> None:
    fused = get_stack_changes(_read_bridge_row(tmp_path, "26.04", "GB300", "llama3.1-8b", "FP8"))["loss"]
    assert fused == FUSED_LOSS < 1 < STACKS["megatron"].loss
    dense = _read_row(tmp_path, **BRIDGE | {"source_repo_path": "NVIDIA/dgxc-benchmarking@v25.02:llama3.1/README.md"})
    assert "loss" not in get_stack_changes(dense)
    logits = SPEC.micro_batch_size * TRAIN.seq_len * SPEC.model.vocab_size
    moved = TRAIN.micro_batches * (STACKS["megatron"].loss - fused) * 32 * logits
    chip = GB200.accelerator
    spared = _timed("none").compute_s - _timed("none", loss=fused).compute_s
    assert spared == pytest.approx(moved / (chip.bytes_per_s * chip.memory_efficiency), rel=1e-2)


def test_offload_takes_host_link_time_in_both_directions() -> None:
    # micro-batches, directions, a quarter of 32 layers
    moved = 4 * 2 * 8 * get_stage_memory(SPEC).get_layer_bytes(moe=False)
    longer = _timed("none", offload_fraction=0.25).step_s - _timed("none").step_s
    assert longer == pytest.approx(moved / 450e9)


def test_unfused_scores_are_offloaded_once_per_saving_operation() -> None:
    """Both the softmax and the matmul after it save the scores."""
    unfused = SPEC.model_copy(update={"train": TRAIN.model_copy(update={"attention": "unfused"})})
    scores = 32 * SPEC.micro_batch_size * TRAIN.seq_len**2 * 2
    for recompute, more in (("none", 1), ("selective", 2)):
        kept = unfused.model_copy(update={"layout": SPEC.layout.model_copy(update={"recompute": recompute})})
        saved = get_stage_memory(kept).get_layer_bytes(moe=False) + more * scores
        longer = [_timed(recompute, spec=unfused, offload_fraction=share).step_s for share in (0.0, 1.0)]
        assert longer[1] - longer[0] == pytest.approx(4 * 2 * 32 * saved / 450e9)


def test_second_token_repeats_the_head_and_runs_a_narrow_one_in_fp8() -> None:
    wide, narrow = (build_head_kernels(SPEC, narrow=narrow).forward for narrow in (False, True))
    assert [k.wide for k in (*wide, *narrow) if isinstance(k, Gemm)] == [True, False]
    assert _timed("none", narrow_head=True).step_s < _timed("none").step_s < _timed("none", head_passes=2).step_s


def test_deepseek_predicts_a_second_token_and_its_last_chunk_is_short(tmp_path: Path) -> None:
    """The model has 61 layers and one more, in 16 chunks of 4. The last chunk has 2."""
    sizes = {"layers": "61", "hidden": "7168", "heads": "128", "kv_heads": "128", "ffn": "2048", "vocab": "129280"}
    pipe = {"tp": "1", "pp": "16", "dp": "16", "ep": "8", "gpus": "256", "recompute": "see recipe"}
    planned = map_row(_read_bridge_row(tmp_path, "26.02", "B200", "deepseek-v3-671b", "MXFP8", **sizes, **pipe))
    model, layout = planned.spec.model, planned.spec.layout
    assert [len(get_stage_chunks(model, layout, i).layers) for i in range(16)] == [4] * 15 + [2]
    assert planned.kernels.head_passes == 2
    assert not has_mtp_layer(_read_bridge_row(tmp_path, "25.11", "GB200", "deepseek-v3-671b (w/o MTP)", "BF16"))


def test_single_layer_chunk_is_slowest_if_both_ends_count_as_a_layer(tmp_path: Path) -> None:
    pipe = {"layers": "126", "pp": "16", "vpp": "8", "gpus": "256", "tp": "4", "dp": "4", "heads": "128"}
    sizes = {"hidden": "16384", "kv_heads": "8", "ffn": "53248"}
    planned = map_row(_read_bridge_row(tmp_path, "26.06", "GB200", "llama3.1-405b", "MXFP8", **pipe, **sizes))
    model, layout = planned.spec.model, planned.spec.layout
    assert {len(get_stage_chunks(model, layout, i).layers) for i in range(16)} == {8}


def test_weights_are_gathered_in_the_type_of_fp8_matmuls() -> None:
    """With ZeRO-3 over a slow network, half of the gathered bytes are not sent."""
    network = GB200.network.model_copy(update={"bytes_per_s": 1e8})
    slow = GB200.model_copy(update={"network": network, "per_node": 8})
    spec = SPEC.model_copy(update={"layout": Layout(dp=64, zero=3)})
    wide, narrow = (
        Timer(slow, {"megatron": STACKS["megatron"]._replace(narrow_parameters=narrow, contention=0.0, jitter=0.0)})
        for narrow in (False, True)
    )
    waits = [timer.get_step(spec).exposed_s["dp"] for timer in (wide, narrow)]
    gathers = [timer._get_step(resolve(spec)).stages.slowest_parameters.gathers_s for timer in (wide, narrow)]
    assert gathers[1] == pytest.approx(gathers[0] / 2, rel=1e-3)
    assert waits[0] - waits[1] == pytest.approx(gathers[0] / 2, rel=1e-2)


def test_first_release_drops_tokens_and_waits_for_no_router(tmp_path: Path) -> None:
    qwen = ("GB200", "qwen3-30b-a3b", "BF16")
    early, late = (map_row(_read_bridge_row(tmp_path, release, *qwen)).kernels for release in ("25.09", "26.02"))
    assert (early.dispatches_per_node, early.syncs_experts, early.launch_s) == (False, False, 0.0)
    assert (late.dispatches_per_node, late.syncs_experts, late.normalizes_heads) == (True, True, True)


def test_fp4_hides_no_tensor_collective(tmp_path: Path) -> None:
    narrow, usual = (
        map_row(_read_bridge_row(tmp_path, "26.04", "GB300", "llama3.1-405b", precision)).kernels.overlap
        for precision in ("NVFP4", "MXFP8")
    )
    assert (narrow, usual) == ({}, STACKS["megatron"].overlap)


def test_latent_attention_lacks_a_fused_kernel_on_first_blackwell_release(tmp_path: Path) -> None:
    row = {**ROW, **DGXC, "model": "deepseek-v3-671b", "layers": "60", "pp": "4", "ep": "64", "note": "NeMo"}
    for gpu, lacks in (("GB200", True), ("H100-SXM5-80GB", False)):
        read = _read_row(tmp_path, **row | {"gpu": gpu})
        assert lacks_fused_attention(read) == lacks
        planned = map_row(read)
        assert (planned.spec.train.attention == "unfused") == lacks
        assert (planned.kernels.dispatches_per_node, planned.kernels.replicates_experts) == (False, True)


def _steady(tmp_path: Path, model: str, note: str) -> tuple[MappedRow, int]:
    named = {"model": model, "note": f"{note}; {APART}", "measure_value": "1e9"}
    planned = map_row(_read_row(tmp_path, **{**ROW, **OWN, **named}))
    return planned, compute_megatron_memory(planned).steady


def test_model_specific_biases_and_positions_are_counted(tmp_path: Path) -> None:
    """Check 12 layers of 512 with 2 bytes of weight and 4 of gradient.

    8 ranks divide 12 bytes of moments and master.
    """
    each = 6 + 12 / 8
    (_, usual), (_, bare) = (_steady(tmp_path, "gpt-test x", note) for note in ("", "disable-bias-linear=True"))
    assert usual - bare == 12 * (3 * 512 + 2048 + 2 * 512) * each
    note = "num-experts=8; swiglu; disable-bias-linear=True"
    (_, learned), (_, rotary) = (
        _steady(tmp_path, "moe-test y", note + more) for more in ("", "; position-embedding-type=rope")
    )
    assert learned - rotary == 1024 * 512 * each
    assert rotary - 7 * 32 * 2**20 == (2 * 12 + 1) * 512 * each


def test_mlp_with_latent_attention_is_gated_only_if_the_model_is(tmp_path: Path) -> None:
    """Two matrices of 2,048 equal three of 1,365. Rounding to a multiple of 8 gives 1,368."""
    planned, _ = _steady(tmp_path, "gpt-test mla", "multi-latent-attention=True")
    assert planned.spec.model.ffn_hidden_size == 1368


def test_muon_launches_each_matrix_separately_and_one_test_hashes_weights(tmp_path: Path) -> None:
    """12 layers hold one of 8 experts per rank: query, key, value, attention output, router, two matmuls."""
    row = {**ROW, **OWN, "ep": "8", "note": "num-experts=8"}
    plain, muon, hashed = (
        map_row(_read_row(tmp_path, **row | {"model": f"moe-test te_ep8_resume{name}"}))
        for name in ("", "_torch_dist_dist_muon", "_torch_dist_muon")
    )
    matrices = 12 * (4 + 1 + 2)
    assert muon.kernels.step_s - plain.kernels.step_s == pytest.approx(matrices * MUON_KERNELS * DEFAULT_LAUNCH_S)
    weights = 4 * count_held_parameters(hashed.spec, 0)
    assert hashed.kernels.step_s - muon.kernels.step_s == pytest.approx(weights / SHA1_BYTES_PER_S)


def test_resumed_run_may_keep_its_loaded_moments(tmp_path: Path) -> None:
    """Two tests recorded in January 2026 keep them. First runs and other tests do not."""
    row = {**ROW, **OWN, "tp": "2", "pp": "2", "dp": "2", "zero": "0", "measure_value": "1e9"}
    folder, file = "NVIDIA/Megatron-LM:tests/gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist", "golden_values_dev_dgx_h100"
    first, second, other = (
        map_row(_read_row(tmp_path, **row | {"model": "gpt-test x", "source_repo_path": f"{folder}{end}.json"}))
        for end in (f"_cp2_nondeterministic/{file}", f"_cp2_nondeterministic/{file}_2nd", f"_mla/{file}_2nd")
    )
    held = count_held_parameters(first.spec, 1)
    assert [
        compute_megatron_memory(planned).steady - compute_megatron_memory(first).steady for planned in (second, other)
    ] == [8 * held, 0]
    assert compute_megatron_memory(second).more == compute_megatron_memory(first).more


def test_megatron_fsdp_keeps_parameters_outside_layers_gathered(tmp_path: Path) -> None:
    """The table, the head and the last norm stay gathered through a step, and after it since May 2026.

    The highest peak does not change. The fp32 router has an additional workspace.
    """
    row = {**ROW, **OWN, "layers": "2", "zero": "3", "ep": "2", "measure_value": "1e9"}
    note = f"num-experts=8; swiglu; disable-bias-linear=True; untie-embeddings; multi-latent-attention=True; {APART}"
    kept, let_go = (
        map_row(_read_row(tmp_path, **row | {"model": f"moe-test {name}", "note": f"{note}{end}"}))
        for name, end in (("deepseek_proxy", ""), ("te_8experts", "; current_scaling; position-embedding-type=rope"))
    )
    ends = 2 * (2 * 50304 * 512 + 512)
    own = compute_megatron_memory(kept)
    assert (own.steady - compute_megatron_memory(let_go).steady, own.more) == (ends + 32 * 2**20, -ends)


@pytest.mark.parametrize(
    ("source", "model", "gpu", "older"),
    [
        ("NVIDIA/NeMo@4c73f77670:performance_summary.md", "llama2-7b", "H100-SXM5-80GB", True),
        ("NVIDIA/NeMo:performance_long_sequence.md", "llama3.1-8b", "B200", False),
        ("NVIDIA/dgxc-benchmarking@v25.02:grok1/README_314b.md", "grok1-314b", "H100-SXM5-80GB", True),
        ("NVIDIA/dgxc-benchmarking@v24.11.1:nemo_megatron/README_175b.md", "gpt3-175b", "H100-SXM5-80GB", True),
        ("NVIDIA/dgxc-benchmarking@v25.02:nemo_megatron/README_175b.md", "gpt3-175b", "H100-SXM5-80GB", False),
        ("NVIDIA/dgxc-benchmarking@v24.11.1:nemotron/README_15b.md", "nemotron4-15b", "H100-SXM5-80GB", False),
        ("NVIDIA/dgxc-benchmarking@v25.05.04:grok1/README.md", "grok1-314b", "GB200", False),
    ],
)
def test_recipes_without_cudnn_attention_run_flash_attention_2(
    tmp_path: Path, source: str, model: str, gpu: str, older: bool
) -> None:
    row = _read_row(tmp_path, **{**ROW, "source_repo_path": source, "model": model, "gpu": gpu, "note": "NeMo"})
    law = get_stack_changes(row).get("attention_hopper", CUDNN_HOPPER)
    assert law.peak_factor / CUDNN_HOPPER.peak_factor == pytest.approx(FLASH_2_FACTOR if older else 1.0)


@pytest.mark.parametrize(
    ("source", "note", "gpu", "early"),
    [
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", "25.11 Pre-Training Performance", "GB300", True),
        ("NVIDIA-NeMo/Megatron-Bridge:docs.md", "26.02 Pre-Training Performance", "GB300", False),
        ("NVIDIA/NeMo:performance_long_sequence.md", "", "B200", True),
        ("NVIDIA/NeMo:performance_long_sequence.md", "", "H100-SXM5-80GB", False),
        ("NVIDIA/dgxc-benchmarking@v25.05.04:grok1/README.md", "", "GB200", True),
    ],
)
def test_images_of_2025_have_slower_cudnn_on_blackwell(
    tmp_path: Path, source: str, note: str, gpu: str, early: bool
) -> None:
    changed = get_stack_changes(_read_row(tmp_path, **{**ROW, "source_repo_path": source, "gpu": gpu, "note": note}))
    assert (changed.get("attention_blackwell") == EARLY_CUDNN_BLACKWELL) is early
    assert ("gemm_fp8" in changed) is (early and "Bridge" not in source)


@pytest.mark.parametrize(
    ("release", "gpu", "model", "takes"),
    [
        ("26.06", "GB300", "deepseek-v3-671b", FP8_LATENT_FACTOR),
        ("26.06", "GB200", "gpt-oss-120b", FP8_WINDOWED_FACTOR),
        ("26.04", "GB300", "deepseek-v3-671b", 1.0),
        ("26.06", "B300", "gpt-oss-120b", 1.0),
        ("26.06", "GB300", "qwen3-30b-a3b", 1.0),
    ],
)
def test_8_bit_attention_matches_cudnn_measurements(
    tmp_path: Path, release: str, gpu: str, model: str, takes: float
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, release, gpu, model, "MXFP8"))
    assert changed.get("attention", 1.0) == pytest.approx(1 / takes)


def test_early_gpt_oss_releases_sum_biases_slowly(tmp_path: Path) -> None:
    before, after = (
        get_stack_changes(_read_bridge_row(tmp_path, release, "GB200", "gpt-oss-120b", "MXFP8"))
        for release in ("26.06", "26.06.01")
    )
    assert "bias_sums" not in before
    assert after["bias_sums"] == SLOW_BIAS_SUMS


@pytest.mark.parametrize(
    ("release", "gpu", "model", "precision", "sorts"),
    [
        ("26.04", "B300", "qwen3-235b-a22b", "MXFP8", True),
        ("26.04.01", "B300", "qwen3-235b-a22b", "MXFP8", False),
        ("26.04", "GB200", "gpt-oss-120b", "BF16", False),
        ("26.04.01", "GB200", "gpt-oss-120b", "BF16", True),
        ("26.04.01", "B200", "gpt-oss-120b", "BF16", True),
        ("26.04.01", "B300", "gpt-oss-120b", "BF16", False),
    ],
)
def test_patch_release_dispatches_tokens_by_its_own_tag(
    tmp_path: Path, release: str, gpu: str, model: str, precision: str, sorts: bool
) -> None:
    changed = get_stack_changes(_read_bridge_row(tmp_path, release, gpu, model, precision, ep="8"))
    assert changed.get("sorts_dispatch", False) is sorts


def test_test_mode_compares_head_norms_with_every_rank(tmp_path: Path) -> None:
    """Each of 12 layers, 4 micro-batches, tp 4 and dp 2 adds six copies of four weights, a comparison and its sum."""
    row = {**OWN, "tp": "4", "dp": "2", "gpus": "8", "layers": "12"}
    usual, checked = (
        map_row(_read_row(tmp_path, **{**ROW, **row, "model": f"gpt-test qk_layernorm{more}", "note": APART}))
        for more in ("", "_test_mode")
    )
    kernels = 1 + 2 * 2 + 6 * (1 + 4 * 2)
    m = usual.spec.train.micro_batches
    assert checked.kernels.step_s - usual.kernels.step_s == pytest.approx(12 * m * kernels * DEFAULT_LAUNCH_S)


def test_nemo_uses_dropout_only_for_gpt_3(tmp_path: Path) -> None:
    source = "NVIDIA/dgxc-benchmarking@v25.02:nemo_megatron/README_175b.md"
    rows = (
        _read_row(tmp_path, **{**ROW, "source_repo_path": source, "model": name})
        for name in ("gpt3-175b", "llama3-70b")
    )
    assert [map_row(row).spec.train.dropout for row in rows] == [True, False]


def test_dummy_gradients_are_kept_for_each_shape(tmp_path: Path) -> None:
    """Compare the memory after a stop with a test that defers its table's gradient.

    The difference is half of four matrices of 512 in 6 layers and of a table of 50,432 rows, in 16 bits, to the byte.
    """
    row = {
        **ROW,
        **OWN,
        "tp": "2",
        "pp": "2",
        "dp": "2",
        "vocab": "50432",
        "model": "gpt-test x",
        "measure_value": "1e9",
    }
    added, apart = (
        compute_megatron_memory(map_row(_read_row(tmp_path, **row | {"note": note}))).steady for note in ("", APART)
    )
    assert added - apart == 544_900_608 - 515_933_696
