"""Exit reports: always valid, and limited in size."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.codec import MAX_EXIT_REPORT_BYTES, validate_exit_report
from contracts.control import HOST_STOPPED_REASON
from contracts.fields import MAX_ABS_NUMBER, MAX_INT64
from contracts.telemetry.items import SCRIPT_SETUP_STEPS, Cell, EvalItem, GaugeItem, PhaseItem, StepItem, TrafficItem
from contracts.telemetry.results import (
    LabItem,
    MemoryParts,
    ProofItem,
    ReferenceProof,
    ReplicaProof,
    VerdictItem,
    VerdictRow,
)
from jobs.runs.baselines import NoFactsError, compute_facts
from meshboard.gate import MissingValueError, check_limits, parse_job
from tests.support.host import build_launch_order
from workers.host.attempts import AttemptDir
from workers.host.rank_files import read_failure
from workers.host.supervisor.exit_report import (
    MAX_POINTS,
    AttemptEnd,
    RankFailure,
    SummaryBuilder,
    build_exit_report,
)
from workers.host.supervisor.log_tail import LogTail
from workers.host.upload_environment import EXIT_CODE

SENSELESS = [
    "[",
    "[1]",
    "null",
    '{"rank": "0", "exit_code": 1, "signal": null}',
    '{"rank": 1, "exit_code": 1, "signal": null}',
    '{"rank": true, "exit_code": 1, "signal": null}',
    '{"rank": 0, "exit_code": 1e99, "signal": null}',
    '{"rank": 0, "exit_code": 1, "signal": ["SIGKILL"]}',
    '{"rank": 0, "exit_code": 1, "signal": "a signal"}',
]


def ending(
    folder: Path, tally: SummaryBuilder, failure: RankFailure | None = None, code: int = 0, error: str = ""
) -> object:
    logs = folder / "logs"
    stderr = logs / "run" / "attempt_0" / "0" / "stderr.log"
    stderr.parent.mkdir(parents=True, exist_ok=True)
    stderr.write_text(error)
    (stderr.parent / "stdout.log").write_text("progress\n")
    tail = LogTail(logs, range(1), 2**20, frozenset({stderr.stat().st_uid}))
    tail.read(final=True)
    ended = AttemptEnd(code=code, failure=failure, ended_by=None, reason="", started=1.0)
    report = build_exit_report(AttemptDir(folder, "job", 1), build_launch_order(), ended, tally, tail)
    assert len(json.dumps(report)) <= MAX_EXIT_REPORT_BYTES
    return validate_exit_report(json.loads(json.dumps(report, allow_nan=False)))


def step(number: int, step_s: float, tokens: int = 100, loss: float | None = 1.0) -> StepItem:
    return StepItem(
        kind="step",
        rank=0,
        time=1.0,
        step=number,
        ran=number,
        steps=number,
        step_s=step_s,
        tokens=tokens,
        loss=loss,
        grad_norm=None,
        learning_rate=0.1,
        cells=[],
    )


def test_reports_success_without_steps_when_the_previous_attempt_finished(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    report: dict[str, Any] = ending(tmp_path, tally)  # type: ignore[assignment]  # validate_exit_report let it pass
    assert (report["outcome"], report["reason"]) == ("succeeded", "finished; this attempt reported no steps")
    tally.add(step(7, 1.0))
    report = ending(tmp_path, tally)  # type: ignore[assignment]
    assert report["reason"] == "finished after step 7"


def test_measured_step_time_excludes_the_first_steps(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    for number in range(1, 4):
        tally.add(step(number, 100.0))
    assert "measured" not in tally.build(), "three steps are no measure of those to come"
    for number, seconds in enumerate([1.0, 9.0, 2.0], 4):
        tally.add(step(number, seconds))
        tally.add({**step(number, 50.0), "rank": 1})
    report: dict[str, Any] = ending(tmp_path, tally)  # type: ignore[assignment]  # validate_exit_report let it pass
    assert report["summary"]["measured"] == {"steps": 3, "step_s": 2.0}


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, MAX_ABS_NUMBER),
    st.integers(0, MAX_INT64),
    st.floats(-MAX_ABS_NUMBER, MAX_ABS_NUMBER),
)
def test_exit_report_is_valid_for_any_step_values(
    tmp_path_factory: pytest.TempPathFactory, step_s: float, tokens: int, loss: float
) -> None:
    tally = SummaryBuilder()
    for number in range(3):
        tally.add(step(number, step_s, tokens, loss))
    report = ending(tmp_path_factory.getbasetemp() / "steps", tally)
    assert isinstance(report, dict)
    assert report["summary"] is not None
    assert report["summary"]["steps"] == 2
    assert report["summary"]["tokens_per_s"] is None or math.isfinite(report["summary"]["tokens_per_s"])


def test_speed_is_total_tokens_over_total_time() -> None:
    """Check a fast and a slow step, whose mean speed would be three times the speed of training."""
    tally = SummaryBuilder()
    for number, seconds in enumerate((0.1, 1.0), 1):
        tally.add(step(number, seconds))
    assert tally.build()["tokens_per_s"] == pytest.approx(200 / 1.1)


def test_script_has_step_time_samples_and_memory_but_no_tokens() -> None:
    tally = SummaryBuilder()
    for number in range(4, 44, 2):
        item: Any = {**step(number, 0.5), "counted": number - 2, "over": 2, "times": [0.25, 0.75], "samples": 8}
        tally.add({**item, "steps": None, "tokens": None, "loss": None, "learning_rate": None})
    tally.add(GaugeItem(kind="gauge", rank=0, time=1.0, peak_bytes=1000))
    tally.add(PhaseItem(kind="phase", rank=0, time=1.0, phase="step", steps=7))
    summary = tally.build()
    assert (summary["steps"], summary["ran_steps"]) == (42, 40)
    assert summary["measured"] == {"steps": 40, "step_s": 0.5}
    assert (summary["tokens_per_s"], summary["samples_per_s"], summary["samples"]) == (None, 16.0, 8)
    assert summary["peak_bytes"] == {"0": 1000}
    assert summary["losses"] == []


def test_thins_both_loss_curves(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    for number in range(1, 5 * MAX_POINTS):
        tally.add(step(number, 0.1))
        tally.add(EvalItem(kind="eval", rank=0, time=1.0, step=number, loss=2.0))
    summary = tally.build()
    for points in (summary["losses"], summary["eval_losses"]):
        assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
        steps = [point["step"] for point in points]
        assert steps == sorted(set(steps))
        assert steps[-1] == 5 * MAX_POINTS - 1, "the last one stays"


def test_keeps_the_last_proof_and_the_memory_of_each_rank(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    for state in ("due", "equal"):
        tally.add(proof(state))
    for rank in range(2):
        tally.add(VerdictItem(kind="verdict", rank=rank, time=1.0, rows=[row("dp")], peak_bytes=100 + rank))
    parts = MemoryParts(parameters=4, gradients=4, optimizer=8, copies=0, gradients_then=4, beside=84)
    tally.add(VerdictItem(kind="verdict", rank=0, time=1.0, rows=[row("dp")], peak_bytes=100, memory=parts))
    report = ending(tmp_path, tally)
    assert isinstance(report, dict)
    assert report["summary"] is not None
    assert report["summary"]["proof"]["one_process"]["state"] == "equal"
    assert report["summary"]["peak_bytes"] == {"0": 100, "1": 101}
    assert report["summary"]["memory"] == {"0": parts}, "a rank of an older version sends none"
    assert "proof" not in SummaryBuilder().build(), "a run that ended before it says nothing"


def proof(state: Any) -> ProofItem:
    replicas = ReplicaProof(steps=[1], parts=4, copied=2, apart=0.0)
    figures = {"tensors": 4, "gradient": 3e-7, "update": 1e-5, "loss": 0.0, "norm": 0.0, "limit": 1e-5, "seconds": 0.5}
    one = ReferenceProof(state=state, why="", steps=3, **figures)  # type: ignore[typeddict-item]  # as ranks send them
    return ProofItem(kind="proof", rank=0, time=1.0, replicas=replicas, one_process=one, wrong=[])


def cell(axis: str) -> Cell:
    return Cell(
        phase="step",
        op="send",
        axis=axis,
        group_size=2,
        count=1,
        completed=1,
        payload_bytes=1,
        algorithmic_bytes=1,
        busy_s=0.0,
    )


def row(axis: str) -> VerdictRow:
    return VerdictRow(
        phase="step",
        op="send",
        axis=axis,
        predicted_count=1,
        measured_count=1,
        predicted_bytes=1,
        measured_bytes=1,
    )


def test_summary_leaves_out_cells_of_the_last_ranks_when_full(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    tally.add(step(1, 0.1))
    for rank in range(64):
        cells = [cell(f"{rank} {number} " + "x" * 180) for number in range(300)]
        tally.add(TrafficItem(kind="traffic", rank=rank, time=1.0, cells=cells, dropped=0))
    tally.add(VerdictItem(kind="verdict", rank=0, time=1.0, rows=[row("dp")]))
    report = ending(tmp_path, tally)
    assert isinstance(report, dict)
    assert report["summary"]["verdict"] == {"0": [row("dp")]}
    saved = [int(rank) for rank in report["summary"]["cells"]]
    assert 0 < len(saved) < 64
    assert saved == list(range(len(saved)))
    assert report["summary"]["cells_left_out"] == 64 - len(saved)
    run = parse_job({"name": "x", "status": "succeeded", "world_size": 64, "exit": report})  # type: ignore[typeddict-item]
    with pytest.raises(MissingValueError, match=f"has no bytes: only {len(saved)} of 64 ranks have stored traffic"):
        run.get_value("bytes")
    told = compute_facts(report, 64)
    assert (told["sent"], told["no_sent"]) == ([], run.no_traffic_reason)


def test_counts_ranks_with_incomplete_cells_but_not_ranks_without_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.host.supervisor.exit_report.MAX_CELLS", 3)
    tally = SummaryBuilder()
    tally.add(step(1, 0.1))
    for rank in range(2):
        cells = [cell("tp"), cell("dp")][: 2 - rank]
        tally.add(TrafficItem(kind="traffic", rank=rank, time=1.0, cells=cells, dropped=0))
    tally.add(TrafficItem(kind="traffic", rank=2, time=1.0, cells=[], dropped=0))
    whole = tally.build()
    assert "cells_left_out" not in whole
    assert compute_facts({"summary": whole}, 4)["sent"], "ranks 2 and 3 sent nothing"
    tally.add(TrafficItem(kind="traffic", rank=1, time=1.0, cells=[cell("dp"), cell("tp")], dropped=0))
    assert tally.build()["cells_left_out"] == 1
    assert compute_facts({"summary": tally.build()}, 4)["no_sent"] == "only 3 of 4 ranks have stored traffic"


def test_leaves_out_a_lab_result_that_is_too_large(tmp_path: Path) -> None:
    tally = SummaryBuilder()
    tally.add(LabItem(kind="lab", rank=0, time=1.0, result={"text": "x" * MAX_EXIT_REPORT_BYTES}))
    report = ending(tmp_path, tally)
    assert isinstance(report, dict)
    assert "lab" not in report["summary"]


def test_reason_is_the_launcher_message_or_the_last_stderr_line(tmp_path: Path) -> None:
    told = RankFailure(0, 1, None, "ValueError: boom")
    silent = told._replace(message="")
    reasons = [
        ending(tmp_path, SummaryBuilder(), told, 1, "Traceback\nOSError: late\n"),
        ending(tmp_path, SummaryBuilder(), silent, 1, "Traceback\nOSError: late\n\n  \n"),
        ending(tmp_path, SummaryBuilder(), silent, 1, ""),
    ]
    assert [report["reason"] for report in reasons if isinstance(report, dict)] == [
        "rank 0 ended with exit code 1: ValueError: boom",
        "rank 0 ended with exit code 1: OSError: late",
        "rank 0 ended with exit code 1: ",
    ]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (HOST_STOPPED_REASON, HOST_STOPPED_REASON),
        ("the gang did not start", "the gang did not start: SignalException: Process 2 got signal: 15"),
    ],
)
def test_stop_of_the_host_is_not_explained_by_the_exception_of_the_stop(
    tmp_path: Path, reason: str, expected: str
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text(
        "Traceback (most recent call last):\n"
        '  File "run.py", line 1, in <module>\n'
        "SignalException: Process 2 got signal: 15\n"
    )
    tail = LogTail(logs, range(1), 2**20, frozenset({logs.stat().st_uid}))
    tail.read(final=True)
    ended = AttemptEnd(code=1, failure=None, ended_by="failed", reason=reason, started=1.0)
    report = build_exit_report(AttemptDir(tmp_path, "job", 1), build_launch_order(), ended, SummaryBuilder(), tail)
    assert report["reason"] == expected


@pytest.mark.parametrize("text", SENSELESS)
def test_ignores_an_invalid_launcher_report(tmp_path: Path, text: str) -> None:
    attempt = AttemptDir(tmp_path, "job", 1)
    attempt.logs.mkdir(parents=True)
    attempt.failure_file.write_text(text)
    assert read_failure(attempt, range(1)) is None


def test_reason_is_why_the_packages_of_an_upload_cannot_be_installed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text("ERROR: no match\nmeshboard: pip ended with exit code 1.\n")
    order = build_launch_order()
    order["upload"] = {"sha256": "a" * 64, "size": 1}
    tail = LogTail(tmp_path / "logs", range(1), 2**20, frozenset({os.geteuid()}))
    tail.read(final=True)
    end = AttemptEnd(code=EXIT_CODE, failure=None, ended_by=None, reason="", started=1.0)
    report = build_exit_report(AttemptDir(tmp_path, "job", 1), order, end, SummaryBuilder(), tail)
    assert (report["outcome"], report["reason"]) == ("failed", "pip ended with exit code 1.")


def test_cleans_the_launcher_message(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path, "job", 1)
    attempt.logs.mkdir(parents=True)
    messages = {"rank": 0, "exit_code": 1, "signal": None, "message": "\x1b[31ma\x1b[0m\x08\0b\ud800\n\nc" + "d" * 9999}
    attempt.failure_file.write_text(json.dumps(messages))
    found = read_failure(attempt, range(1))
    assert found is not None
    report = ending(tmp_path / "end", SummaryBuilder(), found, 1)
    assert isinstance(report, dict)
    assert report["reason"].startswith("rank 0 ended with exit code 1: a\ufffdb? cddd")


def of_script(steps: int, each: int = 263_168, calls: int = 2) -> SummaryBuilder:
    """Return the summary of two ranks with equal traffic per step, and two setup steps."""
    tally = SummaryBuilder()
    whole: Cell = {
        **cell("world"),
        "op": "all_reduce",
        "count": calls * (steps - SCRIPT_SETUP_STEPS),
        "payload_bytes": each * (steps - SCRIPT_SETUP_STEPS),
    }
    for rank in (0, 1):
        setup: Cell = {**whole, "phase": "setup", "count": calls, "payload_bytes": each}
        tally.add(TrafficItem(kind="traffic", rank=rank, time=1.0, cells=[setup, whole], dropped=0))
    tally.add(PhaseItem(kind="phase", rank=0, time=1.0, phase="step", steps=steps))
    return tally


def test_values_per_step_of_a_script_exclude_setup_steps() -> None:
    """Check that two lengths of a loop have equal traffic per step."""
    short, long = (
        parse_job({"name": "x", "status": "succeeded", "exit": {"summary": of_script(steps).build()}})
        for steps in (30, 60)
    )
    assert (short.get_value("bytes.world.all_reduce"), short.get_value("calls.world.all_reduce")) == (526_336, 4)
    assert (short.sent, short.calls) == (long.sent, long.calls)
    assert [row.verdict for row in check_limits([long], [short], [], exact=True)] == ["ok", "ok"]
    summary = of_script(30).build()
    assert (summary["steps"], summary["ran_steps"]) == (30, 28)


@pytest.mark.parametrize("steps", [1, SCRIPT_SETUP_STEPS])
def test_baseline_needs_script_steps_after_setup(steps: int) -> None:
    summary = of_script(steps).build()
    assert not parse_job({"name": "x", "status": "succeeded", "exit": {"summary": summary}}).sent
    with pytest.raises(NoFactsError, match="completed no step after its 2 set-up steps"):
        compute_facts({"summary": summary}, 1)


def test_run_without_steps_left_did_not_stop_early() -> None:
    """Check a finished run, which was once reported as cancelled."""
    tally = SummaryBuilder()
    assert tally.stopped_early(7)
    tally.add({"kind": "verdict", "rank": 0, "time": 1.0, "rows": []})
    assert not tally.stopped_early(7)
