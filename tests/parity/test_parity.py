"""Run a part of the parity matrix (`make parity` runs all), and check that the comparison can fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.cases import Case, core_cases
from tests.parity.compare import TOLERANCE, Result, compare, run_all, run_specs

# Only without sequence parallelism is a router the only parameter whose gradient tp ranks sum.
CASES = [*core_cases()[::6], Case("moe", "tp2")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Result]:
    return dict(zip(CASES, run_all(CASES, tmp_path_factory.mktemp("parity")), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_layout_matches_the_reference_and_the_predicted_traffic(results: dict[Case, Result], case: Case) -> None:
    result = results[case]
    assert result.gradient_difference < TOLERANCE
    assert result.norm_difference < TOLERANCE
    assert result.loss_difference < TOLERANCE
    assert (result.wrong_bytes, result.wrong_calls, result.wrong_memory) == (0, 0, 0)
    assert result.proven
    assert result.over_minimum == pytest.approx(dict.fromkeys(result.over_minimum, 1.0), abs=0.005)


def test_comparison_detects_each_kind_of_difference(tmp_path: Path) -> None:
    case = Case("llama", "dp2")
    good = run_specs({"case": case.spec}, tmp_path)["case"]
    assert compare(case, good, good).passed

    nudged = {name: g.clone() for name, g in good.gradients.items()}
    nudged["layers.2.mlp.up.weight"] *= 1 + 1e-4
    assert compare(case, good, good._replace(gradients=nudged)).gradient_difference == pytest.approx(1e-4, rel=0.01)
    assert not compare(case, good, good._replace(gradients=nudged)).passed

    assert not compare(case, good._replace(losses=[loss * 1.0001 for loss in good.losses]), good).passed

    assert not compare(case, good._replace(norms=[norm * 1.0001 for norm in good.norms]), good).passed

    doubled = [[dict(cell, algorithmic_bytes=2 * cell["algorithmic_bytes"]) for cell in cells] for cells in good.cells]
    assert compare(case, good._replace(cells=doubled), good).over_minimum == pytest.approx({"dp": 2.0})  # type: ignore[arg-type]
    assert not compare(case, good._replace(cells=doubled), good).passed  # type: ignore[arg-type]

    verdict = next(item for item in good.items[1] if item["kind"] == "verdict")
    verdict["memory"]["gradients"] += 4
    assert compare(case, good, good).wrong_memory == 4
    assert not compare(case, good, good).passed
    verdict["memory"]["gradients"] -= 4
    row = verdict["rows"][0]
    row["measured_bytes"] += 1
    assert compare(case, good, good).wrong_bytes == 1
    row["measured_bytes"] -= 1
    row["measured_count"] -= 1
    assert (compare(case, good, good).wrong_bytes, compare(case, good, good).wrong_calls) == (0, 1)
    assert not compare(case, good, good).passed
