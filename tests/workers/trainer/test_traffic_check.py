"""A rank's own comparison misses nothing: a byte, a call, a collective nobody predicted, one that never came."""

from __future__ import annotations

from typing import cast

import pytest

from contracts.telemetry.results import VerdictRow
from contracts.telemetry.vocabulary import Phase
from planner.cost.traffic import eval_traffic, num_evals, setup_traffic, step_traffic
from planner.facts.parse_spec import parse_spec
from workers.meter import Recorder
from workers.trainer.traffic_check import verdict

SPEC = parse_spec(
    {
        "model": {"preset": "llama-tiny"},
        "layout": {"pp": 2, "dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True},
        "train": {"steps": 5, "global_batch": 8, "micro_batches": 2, "eval_every": 2, "warmup_steps": 1},
    }
)
RANK = 5


def counted() -> Recorder:
    """What the meter holds after a run in which everything went as predicted."""
    recorder = Recorder(RANK)
    for axis in ("dp", "tp", "pp"):
        recorder.label_group(axis, axis)
    phases = (("setup", 1, setup_traffic), ("step", 5, step_traffic), ("eval", num_evals(SPEC), eval_traffic))
    for phase, times, traffic in phases:
        recorder.set_phase(cast(Phase, phase))
        for c in traffic(SPEC, RANK):
            for call in range(times * c.count):
                last = call == times * c.count - 1
                each = c.payload_bytes // c.count
                recorder.issue(c.op, c.axis, c.group_size, times * c.payload_bytes - each * call if last else each)
    return recorder


def differences(recorder: Recorder) -> list[VerdictRow]:
    rows = verdict(SPEC, RANK, recorder.get_cells(), {})
    return [
        row
        for row in rows
        if (row["predicted_count"], row["predicted_bytes"]) != (row["measured_count"], row["measured_bytes"])
    ]


def test_a_run_as_predicted_has_no_difference_in_any_phase() -> None:
    assert num_evals(SPEC) == 3
    rows = verdict(SPEC, RANK, counted().get_cells(), {})
    assert {row["phase"] for row in rows} == {"setup", "step", "eval"}
    assert {row["axis"] for row in rows} == {"world", "dp", "tp", "pp"}
    assert differences(counted()) == []


@pytest.mark.parametrize("phase", ["setup", "step", "eval", "teardown"])
def test_one_more_call_is_seen_in_every_phase(phase: Phase) -> None:
    recorder = counted()
    recorder.set_phase(phase)
    recorder.issue("all_gather", "dp", 2, 1)
    (row,) = differences(recorder)
    assert (row["phase"], row["op"], row["axis"]) == (phase, "all_gather", "dp")
    assert row["measured_bytes"] - row["predicted_bytes"] == 1
    assert row["measured_count"] - row["predicted_count"] == 1


def test_a_collective_that_never_came_is_seen() -> None:
    cells = [c for c in counted().get_cells() if (c["phase"], c["op"]) != ("step", "reduce_scatter")]
    missing = [r for r in verdict(SPEC, RANK, cells, {}) if r["measured_count"] != r["predicted_count"]]
    assert {(r["op"], r["axis"], r["measured_count"]) for r in missing} == {
        ("reduce_scatter", "dp", 0),
        ("reduce_scatter", "tp", 0),
    }
    assert all(r["predicted_count"] > 0 for r in missing)
