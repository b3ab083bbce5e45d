"""Some of `make mutations`, and that none of its faults has lost its place in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.faults import FAULTS
from tests.mutations.run import ROOT, Told, copied_tree, run, try_fault

# What only replicas and one process can tell, what only one process can, and what only later steps show.
QUICK = {
    "Trainer and planner omit the reduction of the embedding gradient over dp": ["replicas", "one process"],
    "The bf16 weights are not updated from the master weights": ["one process"],
}


def test_each_fault_can_be_made() -> None:
    sources = {edit.file: (ROOT / edit.file).read_text() for fault in FAULTS.values() for edit in fault.edits}
    lost = {
        (name, edit.old)
        for name, fault in FAULTS.items()
        for edit in fault.edits
        if sources[edit.file].count(edit.old) != 1
    }
    assert lost == set()
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_shows_in_what_the_run_says(name: str, tmp_path: Path) -> None:
    told = try_fault(FAULTS[name], tmp_path)
    assert told.caught_by == QUICK[name], told
    assert (told.wrong_bytes, told.wrong_calls) == (0, 0), "bytes alone would have said nothing"
    assert "differs from" in told.failed


def test_without_a_fault_the_same_run_is_proven(tmp_path: Path) -> None:
    told = run(
        FAULTS["Gradients are averaged instead of summed over dp"].spec, copied_tree(tmp_path / "tree"), tmp_path
    )
    assert told == Told(0, 0, told.replicas, told.one_process, "", "")
    assert told.replicas.startswith("replicas match (68 of 68 shards have replicas")
    assert told.one_process.startswith("gradients match the single-process reference to ")
