"""Benchmark of published rows: it reads every row and reports the rows that it skips."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.published.__main__ import answer_rows, print_report
from benchmarks.published.mapping import MappedRow, map_row
from benchmarks.published.megatron_tests import IN_MAY, IN_OCTOBER, KEEPS_SCORES
from benchmarks.published.recipes import get_stack_changes
from benchmarks.published.rows import SkipError, read_rows
from planner.facts.placements import get_vocab_rows
from planner.facts.spec import JobSpec, Layout, TrainSpec
from planner.facts.stages import get_local_units
from planner.hardware.kernels import FlashAttention, build_layer_kernels
from planner.hardware.stack_options import ASYNC_TP, DETERMINISTIC_EXPERT_S, DETERMINISTIC_LAUNCH_S, GRAPHED
from planner.hardware.stacks import EAGER_NORMS, STACKS

ROW = {
    "source_repo_path": "Aleph-Alpha/layouts:runs.xlsx",
    "gpu": "A100-SXM4-80GB",
    "gpus": "64",
    "model": "llama-13b",
    "layers": "40",
    "hidden": "5120",
    "heads": "40",
    "kv_heads": "40",
    "ffn": "13824",
    "vocab": "128000",
    "seq": "2048",
    "global_batch": "2048",
    "micro_batch": "1",
    "tp": "2",
    "pp": "1",
    "vpp": "1",
    "dp": "32",
    "cp": "1",
    "ep": "1",
    "zero": "1",
    "recompute": "none",
    "precision": "bf16",
    "measure_name": "step_time_s",
    "measure_value": "26.4",
    "step_time_s": "26.4",
    "tier": "A",
    "note": "attention kernel flash_attention2; sequence parallel off",
}


def write_rows(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
    return path


def test_valid_rows_are_answered_and_invalid_rows_counted_by_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = [
        {"gpu": "TPU v5e"},
        {"gpus": "many"},
        {"layers": ""},
        {"tp": "3"},
        {"model": "Mamba-2 hybrid"},
        {"precision": "int3"},
        {"measure_name": "vibes"},
        {"measure_value": "nan", "step_time_s": ""},
        {"heads": "0"},
        {"ep": "8"},
        {"pp": "64", "gpus": "128"},
    ]
    path = write_rows(tmp_path / "rows.csv", {}, {"measure_name": "out_of_memory", "measure_value": "1"}, *strange)
    answers, skipped = answer_rows(read_rows(path))
    assert (len(answers), len(skipped)) == (2, len(strange))
    assert all(reason for *_, reason in skipped)
    print_report(answers, skipped)
    printed = capsys.readouterr().out
    assert "no such accelerator: TPU v5e" in printed
    assert f"skipped: {len(strange)} rows" in printed


def test_equal_rows_give_equal_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(
        tmp_path / "rows.csv", *({"micro_batch": str(b), "measure_value": str(20 + b)} for b in (1, 2, 4, 8))
    )
    tables = []
    for _ in range(2):
        print_report(*answer_rows(read_rows(path)))
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


def test_measurements_of_one_configuration_share_a_half(tmp_path: Path) -> None:
    rows = [{"measure_name": "out_of_memory", "measure_value": "1"}, {"note": "again"}, {"measure_value": "27"}]
    halves = {
        row.is_fit_half
        for row in read_rows(write_rows(tmp_path / "r.csv", {}, *rows))
        if not isinstance(row, SkipError)
    }
    assert len(halves) == 1


@pytest.mark.parametrize(("line", "precision"), [(898, "bf16_gradients"), (899, "bf16")])
def test_bloom_rows_accumulate_in_fp32_from_the_documented_line(tmp_path: Path, line: int, precision: str) -> None:
    bloom = {"source_repo_path": "bigscience-workshop/bigscience:prequel.md", "model": "bloom-200b"}
    note = f"line {line}; Megatron-DeepSpeed, 8 A100 a node"
    (row,) = read_rows(write_rows(tmp_path / "rows.csv", bloom | {"note": note}))
    assert not isinstance(row, SkipError)
    assert map_row(row).spec.train.precision == precision


def test_fsdp2_rows_are_planned_with_the_settings_of_their_code(tmp_path: Path) -> None:
    """Check two sources of FSDP2 rows.

    KempnerForge has nodes of 4, trains all in bf16, writes GiB as GB and defers gradient sums. torchtitan gathers
    stages once per step and reports the reserved peak. Its asynchronous tensor parallelism hides part of the traffic.
    """
    common = {"gpu": "H200", "gpus": "16", "dp": "4", "tp": "4", "zero": "3", "global_batch": "64"}
    kempner = {"source_repo_path": "KempnerInstitute/KempnerForge:b.md", "note": "torch.compile on", **common}
    titan = {"source_repo_path": "pytorch/torchtitan:b_202412_.md", **common, "pp": "2", "dp": "2"}
    peak = {"measure_name": "peak_memory_gb", "measure_value": "10"}
    rows = [kempner | peak, titan | {"note": "AsyncTP; max_reserved of the fullest GPU"}]
    read = [row for row in read_rows(write_rows(tmp_path / "rows.csv", *rows)) if not isinstance(row, SkipError)]
    first, second = (map_row(row) for row in read)
    assert read[0].num_bytes == 10 * 2**30
    assert (first.stack, first.cluster.per_node, first.spec.train.precision) == ("fsdp2", 4, "bf16_state")
    assert (first.kempner, first.meter, first.spec.train.compile, first.spec.layout.zero) == (
        True,
        "allocated",
        False,
        3,
    )
    assert (second.spec.layout.zero, second.meter, second.kernels.overlap) == (1, "reserved", ASYNC_TP)


def test_kempner_pipeline_keeps_whole_tables_on_each_tensor_rank(tmp_path: Path) -> None:
    """Without sequence parallelism, each tensor rank norms all tokens.

    Without compilation, norms run in fp32 with separate kernels, and each matmul gathers its input. Rank 0 reports
    its memory.
    """
    kempner = {"source_repo_path": "KempnerInstitute/KempnerForge:b.md", "gpu": "H200", "gpus": "16"}
    piped = kempner | {"note": "compile off", "tp": "4", "pp": "2", "dp": "2", "zero": "3", "global_batch": "64"}
    rows = [piped, piped | {"pp": "1", "dp": "4", "note": "torch.compile on"}]
    read = [row for row in read_rows(write_rows(tmp_path / "rows.csv", *rows)) if not isinstance(row, SkipError)]
    whole, divided = (map_row(row) for row in read)
    assert [get_vocab_rows(planned.spec) for planned in (whole, divided)] == [128_000, 32_000]
    assert [planned.spec.layout.sequence_parallel for planned in (whole, divided)] == [False, True]
    assert (whole.kernels.norms, whole.kernels.gathers_each_input, whole.stage) == (EAGER_NORMS, True, 0)
    assert (divided.kernels.norms, divided.kernels.gathers_each_input) == (STACKS["fsdp2"].norms, False)
    assert [planned.kernels.gathers_logits for planned in (whole, divided)] == [False, True], "of a head it divides"


def test_megatron_test_rows_use_sizes_of_their_configurations(tmp_path: Path) -> None:
    common = {"source_repo_path": "NVIDIA/Megatron-LM:tests/x.json", "note": "multi-latent-attention=True"}
    dense = common | {"model": "gpt-test gpt3_mcore_te_tp2_pp2_mla"}
    mixed = common | {"model": f"moe-test gpt3_mcore_te_{KEEPS_SCORES}", "recompute": "selective", "ep": "4"}
    rows = [row for row in read_rows(write_rows(tmp_path / "r.csv", dense, mixed)) if not isinstance(row, SkipError)]
    first, second = (map_row(row).spec for row in rows)
    assert first.model.mla is not None
    assert first.model.mla.q_rank == 192
    assert second.model.moe is not None
    assert (second.model.moe.expert_ffn_hidden_size, second.model.moe.shared_experts) == (1024, 1)
    assert (second.model.moe.dense_layers, second.model.ffn_hidden_size, second.layout.recompute) == (2, 4096, "none")


@pytest.mark.parametrize(
    ("gpu", "model", "release", "ep", "host"),
    [
        ("GB300", "deepseek-v3-671b", "26.06", 0.8, 0.0),
        ("GB300", "deepseek-v3-671b", "26.04.01", 0.0, 1.0),
        ("B200", "deepseek-v3-671b", "26.04.01", 0.8, GRAPHED["attention_and_router"]),
        ("B300", "qwen3-235b-a22b", "26.02", 0.0, 1.0),  # overlapped, within a node
        ("B300", "qwen3-235b-a22b", "26.04", 0.0, 1.0),
        ("GB300", "qwen3-30b-a3b", "26.04", 0.0, GRAPHED["router"]),
    ],
)
def test_recipe_options_depend_on_the_release(
    tmp_path: Path, gpu: str, model: str, release: str, ep: float, host: float
) -> None:
    row = {"source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "precision": "MXFP8", "gpu": gpu, "model": model}
    row |= {"pp": "8", "ep": "32" if "deepseek" in model else "8", "note": f"{release} Pre-Training Performance"}
    (read,) = read_rows(write_rows(tmp_path / "rows.csv", row))
    assert not isinstance(read, SkipError)
    usual = STACKS["megatron"]
    kernels = usual._replace(**get_stack_changes(read))
    assert kernels.overlap == usual.overlap | ({"ep": ep} if ep else {})
    assert (kernels.launch_s, kernels.expert_s) == (host * usual.launch_s, usual.expert_s if host else 0.0)


@pytest.mark.parametrize(
    ("gpu", "model", "release", "ep", "shared"),
    [
        ("B300", "qwen3-235b-a22b", "26.04", "8", False),
        ("B300", "qwen3-235b-a22b", "26.06", "8", True),
        ("GB300", "qwen3-235b-a22b", "26.04", "32", True),
        ("GB200", "gpt-oss-120b", "26.02.01", "64", False),
        ("GB200", "gpt-oss-120b", "26.04", "64", True),
        ("B300", "gpt-oss-120b", "26.02", "64", False),
        ("B300", "gpt-oss-120b", "26.04", "8", True),
    ],
)
def test_recipe_without_dispatcher_sends_a_token_to_each_expert(
    tmp_path: Path, gpu: str, model: str, release: str, ep: str, shared: bool
) -> None:
    row = {"source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "precision": "BF16", "gpu": gpu, "model": model}
    (read,) = read_rows(
        write_rows(tmp_path / "rows.csv", row | {"ep": ep, "note": f"{release} Pre-Training Performance"})
    )
    assert not isinstance(read, SkipError)
    kernels = STACKS["megatron"]._replace(**get_stack_changes(read))
    assert (kernels.dispatches_per_node, kernels.sorts_dispatch) == (shared, not shared)


def test_every_second_layer_of_gpt_oss_has_a_window_of_128_tokens(tmp_path: Path) -> None:
    """A window keeps 128 pairs per token, except for the first tokens.

    Other layers keep all causal pairs of 4,096.
    """
    row = {"source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "gpu": "GB200", "model": "gpt-oss-120b"}
    note = "26.04 Pre-Training Performance"
    model = _planned(tmp_path, **row | {"seq": "4096", "note": note}).spec.model
    pairs = 4096**2 / 2, 128 * 4096 - 128**2 / 2
    train = TrainSpec(global_batch=8, micro_batches=8, seq_len=4096, precision="bf16")
    whole = model.model_copy(update={"sliding_window": None})
    specs = [JobSpec(model=shape, layout=Layout(), train=train) for shape in (whole, model)]
    told = [sum(k.flops for k in build_layer_kernels(spec).forward if isinstance(k, FlashAttention)) for spec in specs]
    assert told[0] / told[1] == pytest.approx(pairs[0] / (sum(pairs) / 2))
    assert model.moe is not None
    assert (model.moe.expert_bias, model.moe.swiglu_limit, model.head_dim) == (True, 7.0, 64)


def _planned(tmp_path: Path, **row: str) -> MappedRow:
    (read,) = read_rows(write_rows(tmp_path / "rows.csv", row))
    assert not isinstance(read, SkipError)
    return map_row(read)


DGXC = {"source_repo_path": "NVIDIA/dgxc-benchmarking@v25.05.04:README.md", "tp": "2", "dp": "64", "gpus": "512"}


@pytest.mark.parametrize(("note", "ep"), [("NeMo", 32), ("NeMo; etp 2", 64)])
def test_experts_not_divisible_by_tensor_ranks_are_held_whole(tmp_path: Path, note: str, ep: int) -> None:
    """64 expert ranks hold one of 64 experts each, or half an expert if tensor ranks divide it."""
    row = {**DGXC, "model": "deepseek-v3-671b", "layers": "60", "pp": "4", "ep": "64", "note": note}
    assert _planned(tmp_path, **row).spec.layout.ep == ep


def test_experts_run_separately_if_the_recipe_does_not_group_them(tmp_path: Path) -> None:
    test = {"source_repo_path": "NVIDIA/Megatron-LM:tests/x.json", "ep": "2", "note": "num-experts=8"}
    grok = {**DGXC, "model": "grok1-314b", "ep": "8", "note": "", "gpus": "128"}
    apart = {
        "moe-test gpt3_te_8experts2parallel_dist_optimizer": True,
        "moe-test gpt3_te_8experts2parallel_groupedGEMM": False,
        "moe-test gpt3_tp2_zp_z3_te_8experts2parallel_top2router": False,
    }
    for model, is_apart in apart.items():
        assert _planned(tmp_path, **test, model=model).kernels.separate_experts == is_apart
    h100, gb200 = (_planned(tmp_path, **grok, gpu=gpu).kernels for gpu in ("H100-SXM5-80GB", "GB200"))
    assert (h100.separate_experts, gb200.separate_experts) == (True, False)
    assert (h100.launch_s, gb200.launch_s) == (STACKS["megatron"].launch_s, 0.0)


def test_expert_state_is_divided_among_replicas_of_the_experts(tmp_path: Path) -> None:
    """With 4 experts per rank and 4 data ranks, 2 ranks hold equal experts. ZeRO-1 divides expert moments by 2."""
    row = {"source_repo_path": "NVIDIA/Megatron-LM:tests/x.json", "model": "moe-test te_8experts2parallel", "ep": "2"}
    sizes = {"layers": "2", "hidden": "512", "heads": "8", "kv_heads": "8", "ffn": "2048", "gpus": "8", "dp": "4"}
    kind = {"measure_name": "steady_memory_bytes", "measure_value": "1e9"}
    kind["note"] = "num-experts=8; swiglu; disable-bias-linear=True; position-embedding-type=rope; "
    kind["note"] += "no-gradient-accumulation-fusion=True"
    answers, skipped = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", {**row, **sizes, **kind, "tp": "2"})))
    assert skipped == []
    experts = 2 * 4 * 3 * 512 * 2048 // 2
    spec = answers[0].planned.spec
    whole = sum(p.numel for unit in get_local_units(spec, 0) for p in unit.parameters)
    state = 6 * whole + 12 * (experts // 2 + (whole - experts) // 4)
    assert answers[0].predicted == pytest.approx(state + 3 * 32 * 2**20, rel=1e-3)


OWN = {"gpu": "H100-SXM5-80GB", "gpus": "8", "layers": "12", "hidden": "512", "heads": "8", "kv_heads": "8"} | {
    "ffn": "2048",
    "vocab": "50304",
    "seq": "1024",
    "global_batch": "32",
    "micro_batch": "4",
    "dp": "8",
    "tp": "1",
    "measure_name": "steady_memory_bytes",
    "source_repo_path": "NVIDIA/Megatron-LM:tests/x.json",
}
LOCAL = "transformer-impl=local; no-gradient-accumulation-fusion=True"
MUON = "num-experts=8; no-gradient-accumulation-fusion=True"
SECOND_TOKEN = {"layers": "16", "hidden": "1024", "heads": "32", "kv_heads": "32", "ffn": "4096", "vocab": "51712"} | {
    "seq": "4096",
    "tp": "2",
    "pp": "2",
    "vpp": "4",
    "dp": "2",
    "ep": "4",
    "precision": "fp8",
    "note": "multi-latent-attention=True; swiglu=True; attention-backend=unfused; sequence-parallel=True; untie",
}


@pytest.mark.parametrize(
    ("name", "row", "published", "share"),
    [
        ("gpt-test gpt3_mcore_tp1_pp1", {"precision": "fp16", "note": LOCAL}, 518_880_768, 1e-3),
        (
            "gpt-test gpt3_mcore_tp4_pp1",
            {"precision": "fp16", "tp": "4", "dp": "2", "vocab": "50688", "zero": "0", "note": LOCAL},
            414_416_384,
            2e-3,
        ),
        ("moe-test te_ep8_resume_muon", {"ep": "8", "zero": "0", "note": MUON}, 1_096_738_304, 2e-3),
        ("moe-test ep4_etp1_mtp", SECOND_TOKEN, 7_321_333_248, 0.02),
    ],
)
def test_predicted_memory_of_megatron_tests_matches_recorded_values(
    tmp_path: Path, name: str, row: dict[str, str], published: int, share: float
) -> None:
    """Cover the score buffer without Transformer Engine, fp16 gradients, Muon's single moment, and the second-token
    layer.
    """
    rows = read_rows(write_rows(tmp_path / "rows.csv", {**OWN, **row, "model": name, "measure_value": str(published)}))
    (answer,), skipped = answer_rows(rows)
    assert skipped == []
    assert answer.predicted == pytest.approx(published, rel=share)


def test_compiler_fused_loss_keeps_exponential_and_logit(tmp_path: Path) -> None:
    peak = {**OWN, "measure_name": "peak_memory_bytes", "measure_value": "2e9"}
    rows = [{**peak, "model": f"gpt-test gpt3_mcore_te_tp1{name}"} for name in ("", "_cross_entropy_loss_fusion")]
    plain, fused = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", *rows)))[0]
    assert fused.predicted - plain.predicted == 4 * 1024 * 50304 * 4


def test_rows_without_transformer_engine_launch_faster(tmp_path: Path) -> None:
    with_it, without = (
        _planned(tmp_path, **OWN, model="gpt-test", note=f"transformer-impl={name}").kernels.launch_s
        for name in ("transformer_engine", "local")
    )
    assert with_it > without


@pytest.mark.parametrize(
    ("file", "host"),
    [
        ("gpt/gpt3_mcore_te_tp2_pp2_mla/golden_values_dev_dgx_h100.json", IN_MAY),
        ("gpt/gpt3_mcore_te_tp2_pp2_mla/golden_values_dev_dgx_h100_2nd.json", 1.0),
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline/golden_values_dev_dgx_h100.json", IN_MAY),
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist/golden_values_dev_dgx_h100.json", IN_OCTOBER),
        ("gpt/gpt3_mcore_te_tp1_pp4_vp1/golden_values_dev_dgx_h100.json", 1.0),
        (f"moe/gpt3_mcore_te_{KEEPS_SCORES}/golden_values_dev_dgx_h100.json", IN_OCTOBER),
    ],
)
def test_host_speed_depends_on_the_recording(tmp_path: Path, file: str, host: float) -> None:
    source = f"NVIDIA/Megatron-LM:tests/functional_tests/test_cases/{file}"
    kernels = _planned(tmp_path, **{**OWN, "source_repo_path": source, "model": "gpt-test"}).kernels
    found = kernels.launch_s / DETERMINISTIC_LAUNCH_S, kernels.expert_s / DETERMINISTIC_EXPERT_S
    assert found == pytest.approx((host, host))


def test_cuda_graphs_remove_launches(tmp_path: Path) -> None:
    graphed, usual = (
        _planned(tmp_path, **OWN, model=f"moe-test te_ep8_resume{name}").kernels.launch_s
        for name in ("_scoped_cudagraph", "")
    )
    assert graphed == pytest.approx(GRAPHED["attention_and_router"] * usual)


def test_host_time_counts_the_experts_per_rank_of_the_row(tmp_path: Path) -> None:
    """The row has 64 expert ranks and 2 tensor ranks that divide no expert. The plan has 32 expert ranks."""
    row = {**DGXC, "model": "deepseek-v3-671b", "layers": "60", "pp": "4", "ep": "64", "note": "NeMo"}
    assert _planned(tmp_path, **row).kernels.expert_s == pytest.approx(STACKS["megatron"].expert_s / 2)
    assert _planned(tmp_path, **row | {"note": "etp 2"}).kernels.expert_s == STACKS["megatron"].expert_s


def test_torchtitan_gathers_in_fp8_except_with_rowwise_scales(tmp_path: Path) -> None:
    titan = {"source_repo_path": "pytorch/torchtitan:asyncTP_2025-06_torchtitan.md", "gpu": "H100", "tp": "2"}
    kinds = {"fp8 tensorwise": True, "fp8 rowwise": False}
    found = {kind: _planned(tmp_path, **titan, precision=kind).kernels.narrow_gathers for kind in kinds}
    assert found == kinds
