"""Run some faults of `make mutations`, and check that each fault still finds its source text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.blind_faults import BLIND_FAULTS
from tests.mutations.faults import FAULTS
from tests.mutations.run import (
    ROOT,
    RunChecks,
    copy_tree,
    differs_from_second_implementation,
    run_spec,
    try_fault,
)

# Faults with correct traffic, and the checks that report them.
QUICK = {
    "Trainer and planner omit the reduction of the embedding gradient over dp": ["replicas", "one process"],
    "The bf16 weights are not updated from the master weights": ["one process"],
}


def test_each_fault_finds_its_source_text() -> None:
    faults = {**FAULTS, **BLIND_FAULTS}
    sources = {edit.file: (ROOT / edit.file).read_text() for fault in faults.values() for edit in fault.edits}
    lost = {
        (name, edit.old)
        for name, fault in faults.items()
        for edit in fault.edits
        if sources[edit.file].count(edit.old) != 1
    }
    assert lost == set()
    assert len(faults) >= 70


@pytest.mark.extended
@pytest.mark.parametrize("name", QUICK)
def test_run_reports_a_fault(name: str, tmp_path: Path) -> None:
    result = try_fault(FAULTS[name], tmp_path)
    assert result.detected_by == QUICK[name], result
    assert (result.wrong_bytes, result.wrong_calls) == (0, 0), "bytes alone would have said nothing"
    assert "differs from" in result.failed


def test_run_without_a_fault_passes(tmp_path: Path) -> None:
    result = run_spec(
        FAULTS["Gradients are averaged instead of summed over dp"].spec, copy_tree(tmp_path / "tree"), tmp_path
    )
    assert result == RunChecks(0, 0, result.replicas, result.one_process, "", "")
    assert result.replicas.startswith("replicas match (68 of 68 shards have replicas")
    assert result.one_process.startswith("gradients, updates, and norms match the single-process reference to ")


@pytest.mark.extended
def test_second_implementation_finds_a_fault_that_run_and_reference_share(tmp_path: Path) -> None:
    fault = BLIND_FAULTS["The epsilon of norms is 1e-6"]
    assert differs_from_second_implementation(copy_tree(tmp_path / "faulty", fault.edits))
    assert not differs_from_second_implementation(copy_tree(tmp_path / "right"))
