"""The traffic check detects a wrong byte, a wrong call, and additional or missing collectives."""

from __future__ import annotations

from typing import cast

import pytest

from contracts.telemetry.items import Phase
from contracts.telemetry.results import VerdictRow
from planner.cost.traffic import count_evals, get_eval_traffic, get_setup_traffic, get_step_traffic
from planner.facts.parse_spec import parse_spec
from workers.meter import Recorder
from workers.trainer.traffic_check import compare_run_traffic

SPEC = parse_spec(
    {
        "model": {"preset": "llama-tiny"},
        "layout": {"pp": 2, "dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True},
        "train": {"steps": 5, "global_batch": 8, "micro_batches": 2, "eval_every": 2, "warmup_steps": 1},
    }
)
RANK = 5


def counted() -> Recorder:
    """Record a run with the predicted traffic."""
    recorder = Recorder(RANK)
    for axis in ("dp", "tp", "pp"):
        recorder.label_group(axis, axis)
    phases = (
        ("setup", 1, get_setup_traffic),
        ("step", 5, get_step_traffic),
        ("eval", count_evals(SPEC), get_eval_traffic),
    )
    for phase, times, traffic in phases:
        recorder.set_phase(cast(Phase, phase))
        for c in traffic(SPEC, RANK):
            for call in range(times * c.count):
                last = call == times * c.count - 1
                each = c.payload_bytes // c.count
                recorder.issue(c.op, c.axis, c.group_size, times * c.payload_bytes - each * call if last else each)
    return recorder


def differences(recorder: Recorder) -> list[VerdictRow]:
    rows = compare_run_traffic(SPEC, RANK, recorder.get_cells(), {})
    return [
        row
        for row in rows
        if (row["predicted_count"], row["predicted_bytes"]) != (row["measured_count"], row["measured_bytes"])
    ]


def test_predicted_traffic_has_no_difference() -> None:
    assert count_evals(SPEC) == 3
    rows = compare_run_traffic(SPEC, RANK, counted().get_cells(), {})
    assert {row["phase"] for row in rows} == {"setup", "step", "eval"}
    assert {row["axis"] for row in rows} == {"world", "dp", "tp", "pp"}
    assert differences(counted()) == []


@pytest.mark.parametrize("phase", ["setup", "step", "eval", "teardown"])
def test_detects_an_additional_call_in_every_phase(phase: Phase) -> None:
    recorder = counted()
    recorder.set_phase(phase)
    recorder.issue("all_gather", "dp", 2, 1)
    (row,) = differences(recorder)
    assert (row["phase"], row["op"], row["axis"]) == (phase, "all_gather", "dp")
    assert row["measured_bytes"] - row["predicted_bytes"] == 1
    assert row["measured_count"] - row["predicted_count"] == 1


def test_detects_a_missing_collective() -> None:
    cells = [c for c in counted().get_cells() if (c["phase"], c["op"]) != ("step", "reduce_scatter")]
    missing = [r for r in compare_run_traffic(SPEC, RANK, cells, {}) if r["measured_count"] != r["predicted_count"]]
    assert {(r["op"], r["axis"], r["measured_count"]) for r in missing} == {
        ("reduce_scatter", "dp", 0),
        ("reduce_scatter", "tp", 0),
    }
    assert all(r["predicted_count"] > 0 for r in missing)
