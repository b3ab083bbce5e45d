"""What the published benchmark says a user's page would have said, beside what it says who knows the software."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.published.__main__ import answers_of, report
from benchmarks.published.rows import read_rows
from benchmarks.published.said import Said
from benchmarks.published.scores import sure
from planner.cost.estimate import estimate
from tests.planner.rows.test_benchmark_published import ROW, _file

BRIDGE = {"source_repo_path": "NVIDIA-NeMo/Megatron-Bridge:docs.md", "gpu": "GB200", "note": "26.04 Pre-Training"}


def test_a_page_is_not_told_the_recipe_of_a_row(tmp_path: Path) -> None:
    """The same spec as submitted: eager norms are Scaling's, and its own kernel for them is in no spec."""
    kernel = {"note": "attention kernel flash_attention2 + rms kernel; sequence parallel off"}
    answers, skipped = answers_of(read_rows(_file(tmp_path / "rows.csv", {}, kernel)))
    assert skipped == []
    eager, fused = answers
    assert isinstance(eager.said, Said)
    assert eager.said == fused.said
    assert eager.said.predicted == pytest.approx(eager.predicted)
    assert fused.predicted < 0.95 * eager.predicted
    resources = eager.planned.spec.resources.model_copy(update={"stack": eager.planned.stack})
    told = estimate(eager.planned.spec.model_copy(update={"resources": resources}), eager.planned.cluster)["time"]
    assert (eager.said.predicted, eager.said.share) == (pytest.approx(told["step_s"]), told["interval"]["share"])


def test_both_are_printed_with_how_often_the_interval_holds_and_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {"1": "36", "2": "38", "4": "99"}
    times = [{"micro_batch": b, "measure_value": seconds, "step_time_s": seconds} for b, seconds in took.items()]
    peak = {"measure_name": "peak_memory_bytes", "measure_value": "4e10"}
    adapted, mamba = BRIDGE | {"model": "llama3.1-8b LoRA"}, BRIDGE | {"model": "Mamba-2 hybrid"}
    report(*answers_of(read_rows(_file(tmp_path / "rows.csv", *times, peak, adapted, mamba, mamba))))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    known, said = ([line for line in printed if line[:3] == ["stack", "scaling", "3"]][at] for at in (0, 1))
    assert (known[-1], said[-1]) == ("67%", "67%"), "99 s are in no interval"
    assert ["2", "NVIDIA-NeMo/Megatron-Bridge", "megatron", "layers", "without", "attention", "(Mamba)"] in printed
    reason = ["no", "spec", "says", "adapters", "beside", "frozen", "weights"]
    assert ["1", "NVIDIA-NeMo/Megatron-Bridge", "megatron", *reason] in printed
    assert any(line[:2] == [ROW["source_repo_path"].partition(":")[0], "3"] and len(line) == 6 for line in printed)


def test_as_many_rows_as_hold_nine_tenths_surely_are_more_than_nine_tenths_of_a_few() -> None:
    """21 rows would all lie below the true quantile once in 9 times (0.9^21), 22 in 10; of 100 it is the 95th."""
    assert [sure(list(range(n))) for n in (3, 21, 22, 100)] == [2, 20, 21, 94]


def test_vtrains_rows_stay_beside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    some = list(islice(planner.vtrain_rows(), 9))
    monkeypatch.setattr(planner, "vtrain_rows", lambda: some)
    planner.vtrain(None)
    printed = capsys.readouterr().out
    assert "vTrain one node, zero-shot" in printed
    assert "--vtrain-multi FILE" in printed
