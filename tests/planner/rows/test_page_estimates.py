"""Published benchmark: estimates from a spec alone, compared with estimates from all known settings."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.published.__main__ import answer_rows, print_report
from benchmarks.published.gap import print_gap
from benchmarks.published.predict import PageEstimate, build_software
from benchmarks.published.rows import read_rows
from benchmarks.published.scores import compute_upper_bound
from planner.cost.estimate import estimate
from planner.facts.resources import Resources, SoftwareSpec
from planner.facts.spec_rules import find_software_problems
from planner.hardware.stack_options import MARGINS_WITH_OPTIONS, Stacks
from planner.hardware.stacks import STACKS
from tests.planner.rows.test_benchmark_published import ROW, write_rows

MANY = {"pp": "8", "ep": "32", "gpus": "512"}
TESTS = {"source_repo_path": "NVIDIA/Megatron-LM:tests", "ep": "8", "gpus": "8", "tp": "1", "pp": "1"}
BRIDGE = {"source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "gpu": "GB200", "note": "26.04 Pre-Training"}


def test_page_estimate_uses_the_software_that_a_spec_can_set(tmp_path: Path) -> None:
    """Scaling's norm kernel is a software option, and its stack has none by default.

    A spec with only the stack has a wider interval. A row without a named kernel has no other options.
    """
    kernel = {"note": "attention kernel flash_attention2 + rms kernel; sequence parallel off"}
    unknown = {"note": "sequence parallel off"}
    answers, skipped = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", unknown, kernel, {})))
    assert skipped == []
    eager, fused, usual = answers
    assert isinstance(eager.said, PageEstimate)
    assert isinstance(fused.said, PageEstimate)
    assert isinstance(usual.said, PageEstimate)
    assert eager.said == eager.alone == fused.alone == usual.alone
    assert (eager.said.has_software_facts, usual.said.has_software_facts) == (False, True)
    assert (usual.said.predicted, usual.said.share) == (eager.said.predicted, fused.said.share)
    assert eager.said.predicted == pytest.approx(eager.predicted)
    assert fused.said.predicted == pytest.approx(fused.predicted)
    assert fused.predicted < 0.95 * eager.predicted
    assert (fused.said.share, eager.said.share) == (MARGINS_WITH_OPTIONS["scaling"], STACKS["scaling"].time_margin)
    for answer, software in ((eager, None), (fused, SoftwareSpec(fused_norms=True))):
        resources = answer.planned.spec.resources.model_copy(update={"stack": "scaling", "software": software})
        spec = answer.planned.spec.model_copy(update={"resources": resources})
        told = estimate(spec, answer.planned.cluster)["time"]
        assert isinstance(answer.said, PageEstimate)
        assert (answer.said.predicted, answer.said.share) == (pytest.approx(told["step_s"]), told["interval"]["share"])


@pytest.mark.parametrize(
    ("row", "software"),
    [
        (
            BRIDGE | MANY | {"model": "deepseek-v3-671b", "precision": "MXFP8", "gpu": "B200"},
            SoftwareSpec(cuda_graphs="attention_and_router", overlap_experts=True),
        ),
        (BRIDGE | {"model": "llama3.1-8b", "precision": "BF16", "gpu": "B200"}, SoftwareSpec(cuda_graphs="whole")),
        (
            TESTS | {"model": "moe-test gpt3_mcore_te_ep8_attn_cudagraph_te_a2a_ovlp num-experts=8 top 2"},
            SoftwareSpec(cuda_graphs="attention", deterministic=True, dispatcher="alltoall", overlap_experts=True),
        ),
        (
            {"source_repo_path": "NVIDIA/dgxc-benchmarking@v24.11:grok1", "model": "grok1-314b", "gpu": "H100"},
            SoftwareSpec(dispatcher="alltoall", attention_kernel="flash_2"),
        ),
    ],
)
def test_recipe_settings_equal_their_spec_options(tmp_path: Path, row: dict[str, str], software: SoftwareSpec) -> None:
    """The spec accepts the options, and they equal the constants of the recipe."""
    ((answer,), skipped) = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", row)))
    assert skipped == []
    planned = answer.planned
    assert build_software(answer.row, planned) == software
    resources = Resources(device="cuda", stack="megatron", software=software)
    spec = planned.spec.model_copy(update={"resources": resources})
    assert find_software_problems(spec) == []
    made = Stacks(STACKS, planned.cluster.per_node).get_stack(spec)
    known = planned.kernels
    assert (made.launch_s == 0.0, made.dispatches_per_node) == (known.launch_s == 0.0, known.dispatches_per_node)
    assert made.overlap.get("ep") == known.overlap.get("ep") or planned.own_tests


def test_report_shows_both_estimates_interval_coverage_and_skipped_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {"1": "36", "2": "38", "4": "99"}
    times = [{"micro_batch": b, "measure_value": seconds, "step_time_s": seconds} for b, seconds in took.items()]
    peak = {"measure_name": "peak_memory_bytes", "measure_value": "4e10"}
    adapted, mamba = BRIDGE | {"model": "llama3.1-8b LoRA"}, BRIDGE | {"model": "Mamba-2 hybrid"}
    print_report(*answer_rows(read_rows(write_rows(tmp_path / "rows.csv", *times, peak, adapted, mamba, mamba))))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    known, said = ([line for line in printed if line[:3] == ["stack", "scaling", "3"]][at] for at in (0, 1))
    assert (known[-1], said[-1]) == ("-", "67%"), "99 s are in no interval, and known settings have no interval"
    assert ["2", "NVIDIA-NeMo/Megatron-Bridge", "megatron", "layers", "without", "attention", "(Mamba)"] in printed
    reason = ["a", "spec", "has", "no", "adapters", "with", "frozen", "weights"]
    assert ["1", "NVIDIA-NeMo/Megatron-Bridge", "megatron", *reason] in printed
    assert any(line[:2] == [ROW["source_repo_path"].partition(":")[0], "3"] and len(line) == 7 for line in printed)


def test_fp4_row_has_no_estimate_from_the_stack_alone(tmp_path: Path) -> None:
    row = BRIDGE | {"model": "llama3.1-8b", "precision": "NVFP4", "gpu": "B200"}
    ((answer,), _) = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", row)))
    assert isinstance(answer.said, PageEstimate)
    assert answer.alone == "no stack alone says fp4"


def test_missing_spec_settings_are_ranked_on_the_fit_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every second row has a norm kernel, which explains the whole error of a spec with only the stack."""
    kernel = {"note": "attention kernel flash_attention2 + rms kernel; sequence parallel off"}
    rows = [{"micro_batch": b, **note} for b in ("1", "2", "4", "8") for note in ({}, kernel)]
    answers, _ = answer_rows(read_rows(write_rows(tmp_path / "rows.csv", *rows)))
    fit = [a for a in answers if a.row.is_fit_half]
    assert 0 < len(fit) < len(answers)
    timed = [a._replace(measured=a.predicted) for a in answers]
    print_gap(timed)
    before, after = capsys.readouterr().out.split("error from settings that a spec lacks")
    (line,) = [line.split() for line in before.splitlines() if line.startswith("scaling, norms")]
    changed = [a for a in fit if "rms kernel" in a.row.text("note")]
    alone = [abs(a.alone.predicted / a.predicted - 1) for a in fit if isinstance(a.alone, PageEstimate)]
    assert int(line[2]) == len(changed)
    assert line[3] == line[4] == f"{sum(alone) / len(fit):+.2%}"
    assert "scaling" not in after


def test_upper_bound_of_the_nine_tenths_quantile_needs_more_rows() -> None:
    """With 21 rows, all are below the true quantile once in 9 samples (0.9^21). 22 rows make it once in 10."""
    assert [compute_upper_bound(list(range(n))) for n in (3, 21, 22, 100)] == [2, 20, 21, 94]


def test_vtrain_rows_are_reported_separately(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = list(islice(planner.vtrain_rows(), 9))
    monkeypatch.setattr(planner, "vtrain_rows", lambda: some)
    planner.print_vtrain(None)
    printed = capsys.readouterr().out
    assert "vTrain one node, zero-shot" in printed
    assert "--vtrain-multi FILE" in printed
