"""Configurations of Megatron-LM's functional tests, including tests without a published row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.published import megatron_tests
from benchmarks.published.mapping import MappedRow, map_row
from benchmarks.published.megatron_tests import IN_MAY
from benchmarks.published.predict import Predictor
from benchmarks.published.rows import SkipError, read_rows
from planner.cost.timing import Timer
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.stack_options import DETERMINISTIC_LAUNCH_S, GRAPHED
from planner.hardware.stacks import STACKS
from tests.planner.rows.test_benchmark_published import OWN, SECOND_TOKEN, write_rows

EXPERTS = {"precision": "bf16", "note": "num-experts=8; moe-router-topk=2; sequence-parallel=True"}


def _planned(tmp_path: Path, name: str, **row: str) -> MappedRow:
    (read,) = read_rows(write_rows(tmp_path / "rows.csv", {**OWN, **row, "model": name}))
    assert not isinstance(read, SkipError)
    return map_row(read)


def test_dropout_is_off_if_the_configuration_sets_it(tmp_path: Path) -> None:
    """Tensor ranks divide no expert in both configurations, and only one sets dropout."""
    two = {**EXPERTS, "tp": "2", "dp": "4", "ep": "4"}
    small, proxy = (
        _planned(tmp_path, name, **row)
        for name, row in (
            ("moe-test gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4", two),
            ("moe-test gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", SECOND_TOKEN),
        )
    )
    assert (small.spec.train.dropout, proxy.spec.train.dropout) == (True, False)


@pytest.mark.parametrize(
    ("name", "dense", "second"),
    [
        ("gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", 1, True),
        ("gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph", 1, False),
        ("gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading", 1, True),
        ("gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading", 3, False),
    ],
)
def test_larger_mixtures_with_second_token_prediction(tmp_path: Path, name: str, dense: int, second: bool) -> None:
    planned = _planned(tmp_path, f"moe-test {name}", **SECOND_TOKEN)
    assert planned.spec.model.moe is not None
    assert (planned.spec.model.moe.dense_layers, planned.predicts_two) == (dense, second)
    assert planned.kernels.offload_fraction == ("offloading" in name)


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (megatron_tests.EXPERTS_APART, "te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective", False),
        (megatron_tests.EXPERTS_APART, "te_tp2_pp1_resume_te_8experts2parallel_multi_dist_optimizer_instances", True),
        (megatron_tests.OVERLAPS_EXPERTS, "te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4", True),
        (megatron_tests.OVERLAPS_EXPERTS, "ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading", False),
        (megatron_tests.WIDER_TURNS, "te_tp1_pp4_vp1_resume_torch_dist_tunable_overlap", True),
        (megatron_tests.FUSED_LOSS, "te_tp2_pp2_ep4_etp1_memory_speed", True),
        (megatron_tests.FUSED_LOSS, "gpt3_15b_8t_release_gb200", True),
        (megatron_tests.FUSED_LOSS, "gpt3_15b_8t_release", False),
        (megatron_tests.SENDS_TO_ALL, "te_tp2_pp2_ep4_etp1_memory_speed", True),
        (megatron_tests.SENDS_TO_ALL, "te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4", True),
        (megatron_tests.SENDS_TO_ALL, "te_tp2_pp1_te_8experts_etp1_ep4", False),
        (megatron_tests.SENDS_TO_ALL, "deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release", False),
        (megatron_tests.OVERLAPS_TENSORS, "gpt3_15b_8t_release_sm_gb200", True),
        (megatron_tests.EXPERTS_APART, "tp2_pp2_resume_torch_dist_te_2experts", True),
        (megatron_tests.ROTATES_APART, "deepseek_proxy_fsdp_ep2_fsdp2", True),
        (megatron_tests.ROTATES_APART, "mixtral_8x7b_tp1pp4ep8vpp8_release", True),
        (megatron_tests.ROTATES_APART, "gpt3_15b_8t_release_sm", True),
        (megatron_tests.ROTATES_APART, "gpt3_15b_8t_release_sm_gb200", False),
        (megatron_tests.ROTATES_APART, "deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release", False),
        (megatron_tests.ROTARY, "gpt3_15b_8t_release", True),
        (megatron_tests.FP32_ROUTER, "te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer", True),
        (megatron_tests.WITHOUT_NORM_BIAS, "te_tp2_pp1_te_8experts_etp1_ep4", False),
    ],
)
def test_test_names_determine_options(pattern: str, name: str, found: bool) -> None:
    assert (re.search(pattern, name) is not None) == found


def test_experts_use_their_own_width_if_the_column_has_the_dense_width(tmp_path: Path) -> None:
    row = {**EXPERTS, "tp": "4", "pp": "2", "dp": "1", "ep": "2"}
    moe = _planned(tmp_path, "moe-test te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer", **row).spec.model.moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.expert_ffn_hidden_size) == (8, 2, 683)


def test_pipeline_may_have_fewer_layers_than_chunks_if_its_ends_count(tmp_path: Path) -> None:
    name = "gpt-test gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split"
    planned = _planned(tmp_path, name, layers="6", pp="4", vpp="2", dp="2", measure_name="step_time_s")
    assert planned.spec.model.num_layers == planned.spec.layout.pp * planned.spec.layout.virtual_stages


@pytest.mark.parametrize(("measure", "layers"), [("step_time_s", [4, 3, 3, 3]), ("steady_memory_bytes", [2, 2, 2, 2])])
def test_uneven_pipeline_is_planned_by_slowest_or_last_stage(tmp_path: Path, measure: str, layers: list[int]) -> None:
    name = "gpt-test gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline"
    spec = _planned(tmp_path, name, pp="4", dp="2", measure_name=measure).spec
    assert [spec.model.num_layers // 4 + (i < spec.model.num_layers % 4) for i in range(4)] == layers


def test_attention_graph_alone_leaves_more_launches(tmp_path: Path) -> None:
    core = _planned(tmp_path, "moe-test ep4_etp1_resume_torch_dist_attn_cudagraph", **SECOND_TOKEN)
    assert GRAPHED["attention_and_router"] < core.kernels.launch_s / DETERMINISTIC_LAUNCH_S < 1


@pytest.mark.parametrize(
    ("row", "tensors"),
    [
        ({"zero": "0"}, 12 * 12 * 2),  # two norms and four matmuls with biases, counted twice
        ({"zero": "1"}, 12 * 12 * (1 + 1 / 8)),
        ({"zero": "0", "note": "disable-bias-linear=True"}, 12 * 8 * 2),
        ({"zero": "0", "pp": "4", "dp": "2"}, 3 * 12 * 2),
        ({"zero": "0", "model": "moe-test x", "ep": "2", "note": "num-experts=8"}, 12 * (6 + 3 + 4 * 4) * 2),
    ],
)
def test_step_ends_with_a_log_of_every_tensor(tmp_path: Path, row: dict[str, str], tensors: float) -> None:
    planned = _planned(tmp_path, row.get("model", "gpt-test x"), **{"precision": "bf16"} | row)
    assert planned.kernels.step_s - STACKS["megatron"].step_s == pytest.approx(tensors * DEFAULT_LAUNCH_S)


@pytest.mark.parametrize(
    ("name", "row", "operations", "kernels"),
    [
        ("te_tp2_pp2_mla", {"note": "multi-latent-attention=True; swiglu=True"}, (26, 20), -1),
        ("rope_embeddings_interleaved_no_fusion", {}, (24, 14), 0),
        ("rope_embeddings", {}, (0, 0), 1),
        ("rope_embeddings", {"note": "swiglu=True"}, (0, 0), 0),
        ("resume_torch_dist", {}, (0, 0), 0),
        ("resume_torch_dist", {"note": "swiglu=True"}, (0, 0), -1),
        ("resume_torch_dist", {"note": "num-experts=8", "ep": "2"}, (0, 0), -1),
    ],
)
def test_rotary_kernels_follow_the_test_configuration(
    tmp_path: Path, name: str, row: dict[str, str], operations: tuple[int, int], kernels: int
) -> None:
    """Plans assume Llama's rotary kernel for layers with gates or experts, and none for GPT."""
    planned = _planned(tmp_path, f"gpt-test gpt3_mcore_{name}", precision="bf16", **row)
    seconds = [number * DEFAULT_LAUNCH_S / 2 + kernels * DETERMINISTIC_LAUNCH_S for number in operations]
    assert planned.kernels.layer_s == pytest.approx(seconds)


def test_fused_loss_moves_fewer_bytes(tmp_path: Path) -> None:
    names = ("te_tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion", "te_tp2_pp2_resume_torch_dist")
    fused, usual = (_planned(tmp_path, f"gpt-test {name}", precision="bf16").kernels.loss for name in names)
    assert fused < usual == STACKS["megatron"].loss


def test_activation_recompute_repeats_no_scores(tmp_path: Path) -> None:
    name = "moe-test gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph"
    planned = _planned(tmp_path, name, **{**SECOND_TOKEN, "recompute": "selective", "measure_name": "step_time_s"})
    assert planned.kernels.recompute_modules == ("activation",)
    assert planned.kernels.sorts_dispatch, "it sends by all-to-all"


def test_module_recompute_takes_time_even_if_scores_are_kept(tmp_path: Path) -> None:
    name = "moe-test gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental"
    planned = _planned(tmp_path, name, **{**SECOND_TOKEN, "measure_name": "step_time_s", "measure_value": "1.1"})
    assert planned.makes_again
    assert planned.spec.layout.recompute == "none"
    (read,) = read_rows(
        write_rows(tmp_path / "rows.csv", {**OWN, **SECOND_TOKEN, "model": name, "measure_name": "step_time_s"})
    )
    assert not isinstance(read, SkipError)
    repeated = Predictor().predict(read).predicted
    timer = Timer(planned.cluster, {planned.stack: planned.kernels})
    assert repeated > 1.02 * timer.get_step(planned.spec).step_s


def test_slow_recording_has_a_proportionally_slow_log(tmp_path: Path) -> None:
    folder = "NVIDIA/Megatron-LM:tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset"
    logs = [
        _planned(tmp_path, "gpt-test x", precision="bf16", source_repo_path=f"{folder}/{file}").kernels.step_s
        - STACKS["megatron"].step_s
        for file in ("golden_values_dev_dgx_h100_2nd.json", "golden_values_dev_dgx_h100.json")
    ]
    assert logs[1] / logs[0] == pytest.approx(IN_MAY)
