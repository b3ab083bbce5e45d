"""Find hangs in flight recorder dumps: all faults that torch's analyzer finds, and those at which it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.runs.traces.imports.reader import read_traces
from jobs.runs.traces.imports.reader_process import read_findings, read_in_process
from jobs.runs.traces.imports.trace_files import TraceFile
from tests.jobs.traces.flight_recorder_cases import (
    DONE,
    GLOO_CASES,
    LAST,
    Call,
    Case,
    add_gloo_groups,
    analyze,
    analyze_with_torch,
    format_first,
    make_cases,
    make_dumps,
    record_gloo,
)

CASES = make_cases()
# Torch's analyzer ends with an error at these.
TORCH_FAILS = {"missing dump", "different versions"}
UNKNOWN_TO_TORCH = {"stuck transfer", "healthy"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_names_the_fault(case: Case, tmp_path: Path) -> None:
    result = analyze(case.dumps, tmp_path)
    assert all(word in format_first(result.findings) for word in case.words), result.findings
    assert all(any(word in note for note in result.notes) for word in case.notes), result.notes
    if case.name != "healthy":
        assert all(finding.evidence for finding in result.findings)
        assert "at train.py:" in " ".join(fact["text"] for fact in result.findings[0].evidence)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_finds_what_torch_finds(case: Case, tmp_path: Path) -> None:
    torch = analyze_with_torch(case.dumps)
    assert ("Error" in torch.kind) == (case.name in TORCH_FAILS), torch
    assert (torch.kind == "") == (case.name in UNKNOWN_TO_TORCH), torch
    if not torch.kind or case.name in TORCH_FAILS:
        return
    first = analyze(case.dumps, tmp_path).findings[0]
    assert first.state == "hung"
    facts = " ".join([first.sentence, first.reason, *(fact["text"] for fact in first.evidence)])
    assert torch.sequence == 0 or f" {torch.sequence}" in facts
    ranks = {rank for fact in first.evidence for rank in fact["ranks"]} | {first.action_rank}
    assert set(torch.ranks) <= ranks


def test_evidence_names_call_and_line_of_each_side(tmp_path: Path) -> None:
    other = Call("broadcast", state="started", line=40)
    (finding,) = analyze(make_dumps(lambda rank: [*DONE, other if rank == 1 else LAST]), tmp_path).findings
    assert [fact["text"] for fact in finding.evidence] == [
        "ranks 0, 2 and 3: all_reduce of 64 float32, at train.py:30 in train_step",
        "rank 1: broadcast of 64 float32, at train.py:40 in train_step",
    ]
    assert finding.next == "Print tensor shapes and dtypes before the collective on every rank."


def test_compares_each_group(tmp_path: Path) -> None:
    def make_calls(rank: int) -> list[Call]:
        size = 4 + (rank in (1, 3))
        return [*DONE, Call("all_reduce", size, group="1" if rank < 2 else "2", state="started")]

    sentences = [finding.sentence for finding in analyze(make_dumps(make_calls), tmp_path).findings]
    assert [sentence[:60] for sentence in sentences] == [
        "Traffic mismatch: in call 1 on dp, rank 1 calls all_reduce o",
        "Traffic mismatch: in call 1 on dp, rank 3 calls all_reduce o",
    ]


def test_json_equals_pickle(tmp_path: Path) -> None:
    dumps = make_dumps(lambda rank: [*DONE, *([LAST] if rank != 2 else [])])
    sources = []
    for rank, dump in dumps.items():
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dump))
        sources.append(TraceFile(f"rank_{rank}.json", tmp_path / f"rank_{rank}.json"))
    assert read_traces(sources).findings == analyze(dumps, tmp_path).findings


def test_damaged_dump_is_left_out(tmp_path: Path) -> None:
    def cut(path: Path) -> None:
        if path.name == "rank_3":
            path.write_bytes(path.read_bytes()[:200])

    result = analyze(make_dumps(lambda rank: [*DONE, LAST]), tmp_path, cut)
    assert any(note.startswith("rank_3 is left out: Damaged: ") for note in result.notes), result.notes
    assert "the import has no dump of rank 3" in format_first(result.findings)


@pytest.mark.parametrize(
    "values",
    [
        {"frames": [{"filename": 7}, "x", {"filename": "a\x00", "line": 1, "name": "f"}]},
        {"input_dtypes": ["\x00"], "state": 7},
        {"input_sizes": [[-1]], "output_sizes": 9, "input_dtypes": 7},
        {"state": None, "frames": 3, "record_id": "x"},
    ],
)
def test_reads_unexpected_values(values: dict[str, Any], tmp_path: Path) -> None:
    dumps = make_dumps(lambda rank: [*DONE, LAST])
    for dump in dumps.values():
        dump["entries"][-1].update(values)
    assert "\\u0000" not in json.dumps([finding._asdict() for finding in analyze(dumps, tmp_path).findings])


def test_child_writes_findings(tmp_path: Path) -> None:
    analyze(CASES[0].dumps, tmp_path)
    files = [TraceFile(path.name, path) for path in sorted(tmp_path.iterdir())]
    read_in_process(files, tmp_path)
    assert read_findings(tmp_path)[0]["sentence"].startswith("Stalled: ranks 0, 1 and 3 wait for rank 2")


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("missing", "size") else pytest.param(kind, marks=pytest.mark.extended)
        for kind in sorted(GLOO_CASES)
    ],
)
def test_gloo_ranks(kind: str, tmp_path: Path) -> None:
    """Gloo dumps lack the ranks of groups, at which torch's analyzer fails."""
    dumps = record_gloo(kind)
    findings = analyze(dumps, tmp_path).findings
    assert all(word in format_first(findings) for word in GLOO_CASES[kind]), findings
    assert "flight_recorder_rank.py:" in " ".join(fact["text"] for fact in findings[0].evidence)
    assert analyze_with_torch(dumps).kind.startswith("KeyError")
    assert analyze_with_torch(add_gloo_groups(dumps)).sequence == 2
