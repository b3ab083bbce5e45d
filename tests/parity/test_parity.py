"""A core of the matrix in the default suite, and proof that the comparison can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.cases import CORE, Case, all_cases
from tests.parity.compare import TOLERANCE, Result, Run, compare, run_all, run_specs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Result]:
    cases = all_cases(CORE)
    return dict(zip(cases, run_all(cases, tmp_path_factory.mktemp("parity")), strict=True))


@pytest.mark.parametrize("case", all_cases(CORE), ids=lambda case: case.label)
def test_a_layout_equals_one_process_and_sends_what_was_predicted(results: dict[Case, Result], case: Case) -> None:
    result = results[case]
    assert result.gradient_difference < TOLERANCE
    assert result.loss_difference < TOLERANCE
    assert (result.wrong_bytes, result.wrong_calls) == (0, 0)
    assert result.over_minimum == pytest.approx(dict.fromkeys(result.over_minimum, 1.0), abs=0.005)


def test_the_comparison_sees_a_wrong_gradient_a_wrong_loss_and_a_wrong_byte(tmp_path: Path) -> None:
    case = Case("llama", "dp2")
    good = run_specs({"case": case.spec}, tmp_path)["case"]
    assert compare(case, good, good).passed

    nudged = {name: g.clone() for name, g in good.gradients.items()}
    nudged["layers.2.mlp.up.weight"] *= 1 + 1e-4
    assert compare(case, good, good._replace(gradients=nudged)).gradient_difference == pytest.approx(1e-4, rel=0.01)
    assert not compare(case, good, good._replace(gradients=nudged)).passed

    assert not compare(case, good._replace(losses=[loss * 1.0001 for loss in good.losses]), good).passed

    verdict = next(item for item in good.items[1] if item["kind"] == "verdict")
    verdict["rows"][0]["measured_bytes"] += 1
    assert compare(case, good, good).wrong_bytes == 1


def test_uneven_shards_are_predicted_to_the_byte(tmp_path: Path) -> None:
    """Sizes that dp does not divide make FSDP2 pad; the prediction knows."""
    from planner.spec import parse_spec
    from tests.parity.cases import SIZES

    model = {**SIZES["gpt"], "hidden_size": 60, "ffn_hidden_size": 100, "num_heads": 4, "num_kv_heads": 4}
    layout = {"dp": 4, "tp": 2, "zero": 3, "sequence_parallel": True}
    train = {"steps": 2, "global_batch": 8, "micro_batches": 2, "seq_len": 32, "eval_every": 2, "warmup_steps": 1}
    spec = parse_spec({"model": model, "layout": layout, "train": train})
    run: Run = run_specs({"case": spec}, tmp_path)["case"]
    rows = [row for items in run.items for item in items if item["kind"] == "verdict" for row in item["rows"]]
    assert rows
    assert [r for r in rows if r["measured_bytes"] != r["predicted_bytes"]] == []
    assert [r for r in rows if r["measured_count"] != r["predicted_count"]] == []
    assert all(torch.isfinite(torch.tensor(run.losses)))
