"""The gate's arithmetic: what passes, what fails, and that what cannot be told fails."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshboard.gate import Limit, LimitError, Row, Run, UnknownError, judge, parse, report, run_of

BASE = Run(
    "base",
    step_time=1.0,
    tokens_per_s=100.0,
    peak_memory=2.0**30,
    losses={1: 4.0, 100: 2.0},
    sent={("tp", "all_gather"): 600.0, ("tp", "all_reduce"): 400.0, ("dp", "all_reduce"): 50.0},
    calls={("tp", "all_gather"): 6.0, ("tp", "all_reduce"): 4.0, ("dp", "all_reduce"): 1.0},
    planned=(0, 0),
)


def changed(**fields: Any) -> Run:
    return Run(**{**BASE.__dict__, "name": "run", **fields})


def held(run: Run, *limits: Limit, **how: bool) -> list[Row]:
    return judge([run], [BASE], limits, exact=how.get("exact", False), as_planned=how.get("as_planned", False))


@pytest.mark.parametrize(
    ("text", "side", "value", "relative"),
    [
        ("bytes.tp=+0%", "max", 0.0, True),
        ("step_time=+10%", "max", 0.1, True),
        ("tokens_per_s=-5%", "min", -0.05, True),
        ("step_time=250ms", "max", 0.25, False),
        ("peak_memory=2GiB", "max", 2.0**31, False),
        ("loss@100=3.5", "max", 3.5, False),
        ("calls.dp.all_reduce=12", "max", 12.0, False),
    ],
)
def test_a_limit_is_read(text: str, side: Any, value: float, relative: bool) -> None:
    assert parse(text, side) == Limit(text.partition("=")[0], side, pytest.approx(value), relative)


WRONG = (
    *("", "step_time", "step_time=", "step_time=10%", "step_time=+x%", "step_time=3 parsecs", "step_time=nan"),
    *("step_time=-1s", "speed=+1%", "loss@0=+1%", "loss@=+1%", "bytes.tp.all_gather.extra=+1%", "bytes.=+1%"),
)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_limit_is_told_with_what_would_be_one(text: str) -> None:
    with pytest.raises(LimitError, match=r"expected|say which way|neither"):
        parse(text, "max")


@pytest.mark.parametrize(
    ("limit", "value", "ok"),
    [
        ("bytes.tp=+0%", {"sent": {("tp", "all_gather"): 1000.0}}, True),
        ("bytes.tp=+0%", {"sent": {("tp", "all_gather"): 1001.0}}, False),
        ("bytes.tp.all_gather=+0%", {"sent": {("tp", "all_gather"): 1000.0}}, False),
        ("bytes=+10%", {"sent": {("pp", "send"): 1155.0}}, True),
        ("bytes=+10%", {"sent": {("pp", "send"): 1156.0}}, False),
        ("calls.tp=+0%", {"calls": {("tp", "all_reduce"): 11.0}}, False),
        ("step_time=+10%", {"step_time": 1.1}, True),
        ("step_time=+10%", {"step_time": 1.1001}, False),
        ("step_time=900ms", {"step_time": 0.91}, False),
        ("peak_memory=+5%", {"peak_memory": 2.0**30 * 1.06}, False),
        ("loss@100=+1%", {"losses": {100: 2.03}}, False),
        ("loss@100=+1%", {"losses": {100: 2.01}}, True),
        ("loss@7=+1%", {}, False),
        ("step_time=+10%", {"step_time": None}, False),
        ("bytes.tp=+0%", {"sent": {}}, False),
    ],
)
def test_a_maximum(limit: str, value: dict[str, Any], ok: bool) -> None:
    assert [row.ok for row in held(changed(**value), parse(limit, "max"))] == [ok]


def test_a_minimum() -> None:
    floor = parse("tokens_per_s=-5%", "min")
    assert held(changed(tokens_per_s=95.0), floor)[0].ok
    assert not held(changed(tokens_per_s=94.9), floor)[0].ok


def test_a_share_needs_a_baseline() -> None:
    (row,) = judge([BASE], [], [parse("step_time=+10%", "max")], exact=False, as_planned=False)
    assert not row.ok
    assert "no baseline" in row.why
    (row,) = judge([BASE], [], [parse("step_time=2s", "max")], exact=False, as_planned=False)
    assert row.ok


def test_several_runs_are_their_median_and_several_baselines_have_a_noise() -> None:
    baselines = [changed(name=str(t), step_time=t) for t in (1.0, 1.1, 1.3)]
    limit = [parse("step_time=+10%", "max")]
    runs = [changed(step_time=t) for t in (9.0, 1.25, 1.0)]
    (row,) = judge(runs, baselines, limit, exact=False, as_planned=False)
    assert (row.ok, row.value, row.baseline, row.spread) == (True, 1.25, 1.1, (1.0, 1.3))
    assert "3 baselines span" in row.why
    (row,) = judge([changed(step_time=1.31)], baselines, limit, exact=False, as_planned=False)
    assert not row.ok


def test_exact_names_every_axis_and_collective_that_moved() -> None:
    assert all(row.ok for row in held(BASE, exact=True))
    off = changed(sent={**BASE.sent, ("tp", "all_gather"): 0.0, ("pp", "send"): 8.0})
    wrong = [row for row in held(off, exact=True) if not row.ok]
    assert [(row.what, row.value, row.baseline) for row in wrong] == [
        ("bytes.pp.send (exact)", 8.0, 0.0),
        ("bytes.tp.all_gather (exact)", 0.0, 600.0),
    ]
    assert not all(row.ok for row in held(changed(sent={}), exact=True)), "what was not counted is not equal"


def test_as_planned_wants_a_comparison_that_found_nothing() -> None:
    assert held(BASE, as_planned=True)[0].ok
    assert not held(changed(planned=(0, 1)), as_planned=True)[0].ok
    assert not held(changed(planned=None), as_planned=True)[0].ok


def test_figures_of_a_job_are_those_of_its_ranks() -> None:
    cell = {"axis": "dp", "op": "all_reduce", "phase": "step", "payload_bytes": 100, "count": 2}
    verdict = {"measured_bytes": 7, "predicted_bytes": 4, "measured_count": 1, "predicted_count": 1}
    summary = {
        "steps": 30,
        "ran_steps": 10,
        "tokens_per_s": 5.0,
        "measured": {"steps": 7, "step_s": 0.5},
        "peak_bytes": {"0": 5, "1": 9},
        "losses": [{"step": 3, "loss": 1.5, "time": 0.0}],
        "cells": {"0": [cell, {**cell, "phase": "eval"}], "1": [cell]},
        "verdict": {"0": [verdict], "1": [verdict]},
    }
    run = run_of({"name": "x", "status": "succeeded", "exit": {"summary": summary}})
    assert (run.value("bytes.dp"), run.value("calls"), run.value("peak_memory")) == (20.0, 0.4, 9)
    assert (run.value("step_time"), run.value("loss"), run.planned) == (0.5, 1.5, (6, 0))
    with pytest.raises(UnknownError, match="is failed"):
        run_of({"name": "x", "status": "failed", "exit": {"summary": summary}})


@given(st.floats(1e-6, 1e12), st.floats(0, 1e3))
def test_what_equals_its_bound_is_within_it(baseline: float, percent: float) -> None:
    limit = Limit("step_time", "max", percent / 100, relative=True)
    assert limit.holds(baseline * (1 + percent / 100), baseline)
    assert not limit.holds(baseline * (1 + percent / 100) * 1.000001, baseline)


def test_every_report_tells_the_failure() -> None:
    limits = parse("bytes.tp=+0%", "max"), parse("step_time=9s", "max")
    rows = held(changed(sent={("tp", "all_gather"): 1001.0}), *limits)
    assert report.table(rows).splitlines()[1].split()[:5] == ["FAIL", "bytes.tp", "(max)", "1,001", "B"]
    assert report.table(rows).endswith("1 passed, 1 failed")
    assert "| FAIL | bytes.tp (max) | 1,001 B | 1,000 B |" in report.markdown(rows, "gate")
    suite = ElementTree.fromstring(report.junit(rows, "gate <&>"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("name")) == ("2", "1", "gate <&>")
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed == ["bytes.tp (max)"]
    assert json.loads(report.as_json(rows))["ok"] is False
