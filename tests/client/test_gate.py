"""Arithmetic and reports of the gate."""

from __future__ import annotations

import json
import math
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshboard import formatting
from meshboard.commands.app import ExitCode
from meshboard.gate import (
    CheckResult,
    Limit,
    LimitError,
    MissingValueError,
    RunMeasures,
    check_limits,
    format_value,
    parse_job,
    parse_limit,
    report,
)

BASE = RunMeasures(
    "base",
    step_time=1.0,
    tokens_per_s=100.0,
    peak_memory=2.0**30,
    losses={1: 4.0, 100: 2.0},
    sent={("tp", "all_gather"): 600.0, ("tp", "all_reduce"): 400.0, ("dp", "all_reduce"): 50.0},
    calls={("tp", "all_gather"): 6.0, ("tp", "all_reduce"): 4.0, ("dp", "all_reduce"): 1.0},
    plan_difference=(0, 0),
)


def changed(**fields: Any) -> RunMeasures:
    return RunMeasures(**{**BASE.__dict__, "name": "run", **fields})


def held(run: RunMeasures, *limits: Limit, **how: bool) -> list[CheckResult]:
    return check_limits([run], [BASE], limits, **how)


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
def test_parses_a_limit(text: str, side: Any, value: float, relative: bool) -> None:
    assert parse_limit(text, side) == Limit(text.partition("=")[0], side, pytest.approx(value), relative)


WRONG = (
    *("", "step_time", "step_time=", "step_time=10%", "step_time=+x%", "step_time=3 parsecs", "step_time=nan"),
    *("step_time=-1s", "speed=+1%", "loss@0=+1%", "loss@=+1%", "bytes.tp.all_gather.extra=+1%", "bytes.=+1%"),
)


@pytest.mark.parametrize("text", WRONG)
def test_rejects_invalid_limits_with_a_hint(text: str) -> None:
    with pytest.raises(LimitError, match=r"Use MEASURE=LIMIT|Add a sign|Use a percentage|'parsecs'"):
        parse_limit(text, "max")


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
def test_checks_a_maximum(limit: str, value: dict[str, Any], ok: bool) -> None:
    assert [row.ok for row in held(changed(**value), parse_limit(limit, "max"))] == [ok]


def test_checks_a_minimum() -> None:
    floor = parse_limit("tokens_per_s=-5%", "min")
    assert held(changed(tokens_per_s=95.0), floor)[0].ok
    assert not held(changed(tokens_per_s=94.9), floor)[0].ok


def test_relative_limit_needs_a_baseline() -> None:
    (row,) = check_limits([BASE], [], [parse_limit("step_time=+10%", "max")])
    assert not row.ok
    assert "needs a baseline" in row.why
    (row,) = check_limits([BASE], [], [parse_limit("step_time=2s", "max")])
    assert row.ok


def test_counted_measures_have_no_noise() -> None:
    """Each run is held to the newest baseline: an older one may be of before a change that was meant."""
    older = changed(sent={("tp", "all_gather"): 9000.0})
    limit = [parse_limit("bytes.tp=+0%", "max")]
    more = changed(sent={**BASE.sent, ("tp", "all_gather"): 500.0, ("tp", "all_reduce"): 507.0})
    (row,) = check_limits([BASE, more], [BASE, older], limit)
    assert (row.verdict, row.value, row.baseline, row.low) == ("FAIL", 1007.0, 1000.0, None)
    assert row.why == "run: tp all_reduce +107 B, tp all_gather -100 B"
    assert check_limits([BASE], [BASE, older], limit)[0].ok
    assert not check_limits([BASE], [older, BASE], [parse_limit("bytes.tp=-0%", "min")])[0].ok


def test_fails_for_an_unknown_axis() -> None:
    (row,) = held(BASE, parse_limit("bytes.tpp=+0%", "max"))
    assert (row.ok, row.why) == (False, "No run has traffic of tpp. Use one of: dp, tp.")
    (row,) = held(BASE, parse_limit("calls.tp.gather=+0%", "max"))
    assert row.why == "No run has traffic of tp.gather. Use one of: dp.all_reduce, tp.all_gather, tp.all_reduce."


def test_exact_names_changed_axes_and_collectives() -> None:
    assert all(row.ok for row in held(BASE, exact=True))
    off = changed(sent={**BASE.sent, ("tp", "all_gather"): 0.0, ("pp", "send"): 8.0})
    wrong = [row for row in held(off, exact=True) if not row.ok]
    assert [(row.what, row.value, row.baseline) for row in wrong] == [
        ("bytes.pp.send (exact)", 8.0, 0.0),
        ("bytes.tp.all_gather (exact)", 0.0, 600.0),
    ]
    assert not all(row.ok for row in held(changed(sent={}), exact=True)), "missing counts are not equal"


def test_as_planned_fails_for_any_difference() -> None:
    assert held(BASE, as_planned=True)[0].ok
    assert not held(changed(plan_difference=(0, 1)), as_planned=True)[0].ok
    assert not held(changed(plan_difference=None), as_planned=True)[0].ok


def test_parses_measurements_of_all_ranks() -> None:
    cell = {"axis": "dp", "op": "all_reduce", "phase": "step", "payload_bytes": 100, "count": 2}
    verdict = {"measured_bytes": 7, "predicted_bytes": 4, "measured_count": 1, "predicted_count": 1}
    summary = {
        "steps": 30,
        "ran_steps": 10,
        "tokens_per_s": 5.0,
        "measured": {"steps": 7, "step_s": 0.5},
        "peak_bytes": {"0": 5, "1": 9},
        "losses": [{"step": 3, "loss": 2.5, "time": 0.0}, {"step": 30, "loss": 1.5, "time": 9.0}],
        "cells": {"0": [cell, {**cell, "phase": "eval"}], "1": [cell]},
        "verdict": {"0": [verdict], "1": [verdict]},
    }
    run = parse_job({"name": "x", "status": "succeeded", "exit": {"summary": summary}})
    assert (run.get_value("bytes.dp"), run.get_value("calls"), run.get_value("peak_memory")) == (20.0, 0.4, 9)
    assert (run.get_value("step_time"), run.get_value("loss"), run.plan_difference) == (0.5, 1.5, (6, 0))
    with pytest.raises(MissingValueError, match="has the status failed"):
        parse_job({"name": "x", "status": "failed", "exit": {"summary": summary}})


@pytest.mark.parametrize("how", [{"exact": True}, {}])
def test_ignores_measurements_of_some_ranks(how: dict[str, bool]) -> None:
    cell = {"axis": "dp", "op": "all_reduce", "phase": "step", "payload_bytes": 100, "count": 2}
    summary = {"steps": 1, "cells": {"0": [cell]}, "cells_left_out": 3, "peak_bytes": {"0": 5}}
    content: Any = {"id": "j", "status": "succeeded", "world_size": 4, "exit": {"summary": summary}}
    rows = check_limits(
        [parse_job(content)],
        [BASE],
        [] if how else [parse_limit("bytes=+0%", "max"), parse_limit("peak_memory=1GiB", "max")],
        **how,
    )
    assert [row.verdict for row in rows] == ["FAIL", "FAIL"]
    assert rows[0].why == "job j has no bytes: only 1 of 4 ranks have stored traffic"
    measure, stored = ("calls", "stored traffic") if how else ("peak_memory", "a stored peak")
    assert rows[1].why == f"job j has no {measure}: only 1 of 4 ranks have {stored}"


def test_has_no_loss_after_a_nan() -> None:
    """A run can continue after a NaN (train.on_not_finite)."""
    summary = {"steps": 12, "losses": [{"step": 6, "loss": 1.5, "time": 0.0}]}
    run = parse_job({"id": "x", "status": "succeeded", "exit": {"summary": summary}})
    [row] = check_limits([run], [BASE], [parse_limit("loss=9", "max")])
    words = "job x has no loss at its last step 12. The nearest stored loss is at step 6."
    assert (row.verdict, row.value, row.why) == ("FAIL", None, words)
    assert check_limits([run], [], [parse_limit("loss@6=9", "max")])[0].ok
    assert check_limits([changed(losses={6: 1.5}, last_step=None)], [], [parse_limit("loss=9", "max")])[0].ok


@given(st.floats(1e-6, 1e12), st.floats(0, 1e3))
def test_value_at_the_bound_is_within_the_limit(baseline: float, percent: float) -> None:
    limit = Limit("step_time", "max", percent / 100, relative=True)
    assert limit.is_met_by(baseline * (1 + percent / 100), baseline)
    assert not limit.is_met_by(baseline * (1 + percent / 100) * 1.000001, baseline)


@pytest.mark.parametrize(("value", "side", "holds"), [(-2.0, "max", True), (-1.7, "max", False), (-2.3, "min", False)])
def test_relative_limit_of_a_negative_baseline(value: float, side: Any, holds: bool) -> None:
    """A log-likelihood's: an unchanged run failed, and one that was worse looked better."""
    limit = Limit("loss", side, 0.1 if side == "max" else -0.1, relative=True)
    assert limit.is_met_by(value, -2.0) is holds
    row = CheckResult("loss", "OK", value, -2.0, limit.get_bound(-2.0), "")
    assert row.change == pytest.approx((value + 2) / 2)


def test_every_report_shows_a_failure() -> None:
    limits = parse_limit("bytes.tp=+0%", "max"), parse_limit("step_time=9s", "max")
    rows = held(changed(sent={("tp", "all_gather"): 1001.0}), *limits)
    assert report.format_table(rows).splitlines()[1].split()[:5] == ["FAIL", "bytes.tp", "(max)", "1,001", "B"]
    assert report.format_table(rows).endswith("1 passed, 1 failed")
    hostile = rows[0]._replace(what="a\\|b\u202e\nc<img>", why="\x1b[31mred")
    shown = report.format_markdown([hostile], "gate").splitlines()[-1]
    assert shown.endswith("| red |")
    assert r"| a\\\|b??c&lt;img> |" in shown, "as GitHub reads a cell: the backslash, then the pipe"
    assert shown.isprintable()
    content = report.format_markdown(rows, "gate")
    assert (
        "| FAIL | bytes.tp (max) | 1,001 B | 1,000 B | +0.10% | 1,000 B | tp all_gather +401 B, tp all_red" in content
    )
    whole = ElementTree.fromstring(report.format_junit(rows, "gate <&>", 1.25))
    (suite,) = whole
    assert [whole.tag, suite.tag] == ["testsuites", "testsuite"]
    for row_text in (whole, suite):
        found = [row_text.get(name) for name in ("name", "tests", "failures", "errors", "time")]
        assert found == ["gate <&>", "2", "1", "0", "1.250"]
    assert [case.get("time") for case in suite] == ["0", "0"], "a comparison of figures takes none"
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed == ["bytes.tp (max)"]
    assert report.to_json(rows)["ok"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step_time=5MiB", r"The unit is 'MiB', but step_time is in seconds \(s, ms, us\)\."),
        ("loss=10GiB", "The unit is 'GiB', but loss is a number without a unit"),
        ("loss@3=1s", "The unit is 's', but loss@3 is a number without a unit"),
        ("bytes=10s", r"The unit is 's', but bytes is in bytes \(B, kB, .*\)"),
        ("bytes.tp.all_gather=1ms", "'ms'"),
        ("calls=2KiB", "'KiB'"),
        ("peak_memory=1s", "'s'"),
        ("tokens_per_s=1GiB", r"The unit is 'GiB', but tokens_per_s is in tokens per second \(tokens/s\)"),
        ("step_time=1e400s", "The limit is inf. Use at most 1e"),
        ("step_time=+1e400%", "The limit is inf. Use at most 1e"),
        ("step_time=1e300s", "Use at most 1e"),
    ],
)
def test_rejects_a_limit_with_the_wrong_unit(text: str, words: str) -> None:
    for side in ("max", "min"):
        with pytest.raises(LimitError, match=words):
            parse_limit(text, side)  # type: ignore[arg-type]
    assert parse_limit("step_time=20us", "max").value == pytest.approx(2e-5)
    assert parse_limit("tokens_per_s=5tokens/s", "min").value == 5


@pytest.mark.parametrize("field", ["step_time", "tokens_per_s", "peak_memory"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_fails_a_check_and_is_null_in_json(field: str, value: float) -> None:
    rows = held(changed(**{field: value}), parse_limit(f"{field}=+1%", "max"), parse_limit("loss=+1%", "max"))
    assert (rows[0].ok, "not a finite number" in rows[0].why) == (False, True)
    rows = held(changed(sent={("tp", "all_gather"): value}), exact=True)
    content = formatting.format_json(report.to_json(rows))
    assert not all(row.ok for row in rows)
    assert "NaN" not in content
    assert "Infinity" not in content
    assert report.format_table(rows)


def test_formats_large_values_in_full() -> None:
    assert format_value(153_014_272 * 1.05, "B") == "160,664,986 B", "bytes have no fraction"
    assert format_value(72_253_972.7, "B") == "72,253,973 B"
    assert format_value(508_791.4666666667, "B") == "508,791.5 B"
    assert format_value(1.9333333333333333, "") == "1.933333"
    assert format_value(1_234_567.891, "tokens/s") == "1,234,567.9 tokens/s"
    assert format_value(0.25, "s") == "0.25 s"
    assert format_value(2.0**30, "B") == "1,073,741,824 B"


def test_formats_changes_in_full() -> None:
    more = changed(sent={**BASE.sent, ("tp", "all_reduce"): 400.0 + 26_316.8 / 3, ("tp", "all_gather"): 600.25})
    (row,) = held(more, parse_limit("bytes.tp=+0%", "max"))
    assert row.why == "tp all_reduce +8,772.267 B, tp all_gather +0.25 B"


def test_replaces_characters_that_xml_does_not_allow() -> None:
    name = "a\uffff\x00\x1b\ud800b<&>\U0001f600"
    row = CheckResult(f"bytes.{name}", "FAIL", 1.0, None, 0.0, "B", name)
    text = report.format_junit([row], name, 0.0)
    suite = ElementTree.fromstring(text.encode())
    assert suite.get("name") == "a\ufffd\ufffd\ufffd\ufffdb<&>\U0001f600"
    assert 'encoding="UTF-8"' in text.splitlines()[0]


@pytest.mark.parametrize("values", [("j", "j", "j"), ("j", "--baseline", "main", "--baseline", "main")])
def test_rejects_a_run_that_is_listed_twice(meshboard: Any, server: Any, values: tuple[str, ...]) -> None:
    ran = meshboard("gate", *values, "--max", "loss=9", at=server)
    assert (ran.code, server.requests) == (2, [])
    assert f"is listed {values.count(values[-1])} times" in ran.err


def of_board(job_id: str, **sent: int) -> RunMeasures:
    """A run of several that share a name, as `submit --runs` makes them."""
    cells = [
        {"axis": "tp", "op": op, "phase": "step", "payload_bytes": num_bytes, "count": 1}
        for op, num_bytes in sent.items()
    ]
    summary = {"steps": 1, "cells": {"0": cells}, "verdict": {}}
    return parse_job({"id": job_id, "name": "ci", "status": "succeeded", "exit": {"summary": summary}})


def test_results_of_several_runs_name_their_run() -> None:
    """Jobs of one spec have equal names, so results show the ID."""
    runs = [of_board("aaaaaaaaaa", all_gather=8), of_board("bbbbbbbbbb", all_gather=9), of_board("cccccccccc")]
    rows = check_limits(runs, runs[:1], [parse_limit("bytes.tp=+0%", "max")], exact=True, as_planned=True)
    failed = {row.what for row in rows if not row.ok}
    assert "bytes.tp.all_gather (exact) of job bbbbbbbbbb" in failed
    assert "bytes.tp.all_gather (exact) of job aaaaaaaaaa" not in failed
    assert "bytes (exact) of job cccccccccc" in failed
    assert "as planned of job bbbbbbbbbb" in failed
    cases = [
        case.get("name") for case in ElementTree.fromstring(report.format_junit(rows, "gate", 0.0)).iter("testcase")
    ]
    assert len(set(cases)) == len(cases) == len(rows)
    rows = check_limits(runs[:2], runs[:1], [parse_limit("bytes.tp=+0%", "max")])
    assert [row.why for row in rows] == ["job bbbbbbbbbb: tp all_gather +1 B"]


def test_numbers_checks_of_one_measure() -> None:
    limits = [parse_limit(text, "max") for text in ("step_time=+10%", "step_time=9s", "step_time=+10%")]
    assert [row.what for row in held(BASE, *limits)] == ["step_time (max)", "step_time (max) 2"]


def test_names_the_run_that_failed(meshboard: Any, server: Any, tmp_path: Any) -> None:
    for job_id, num_bytes in (("j", 8), ("k", 9)):
        cell = {"axis": "tp", "op": "send", "phase": "step", "payload_bytes": num_bytes, "count": 1}
        summary = {"steps": 1, "cells": {"0": [cell]}}
        ended = {"id": job_id, "status": "succeeded", "finished": True, "name": "ci", "exit": {"summary": summary}}
        server.respond_at(f"jobs/{job_id}", ended)
        (tmp_path / "base.json").write_text(json.dumps(ended)) if job_id == "j" else None
    file = tmp_path / "gate.xml"
    ran = meshboard(
        "gate", "j", "k", "--baseline", str(tmp_path / "base.json"), "--exact", "--junit", str(file), at=server
    )
    failed = [line.split("  ")[1] for line in ran.out.splitlines() if line.startswith("FAIL")]
    assert (ran.code, failed) == (1, ["bytes.tp.send (exact) of job k"])
    assert ElementTree.parse(file).getroot().tag == "testsuites"


@pytest.mark.parametrize(("limit", "code"), [("9s", ExitCode.BROKEN), ("1s", ExitCode.FAILED)])
def test_prints_results_if_a_report_cannot_be_written(
    meshboard: Any, server: Any, tmp_path: Any, limit: str, code: int
) -> None:
    exited = {"summary": {"steps": 9, "measured": {"steps": 7, "step_s": 2.0}}}
    server.respond_at("jobs/j", {"id": "j", "status": "succeeded", "finished": True, "name": "ci", "exit": exited})
    nowhere = tmp_path / "none" / "gate.xml"
    requested = ("gate", "j", "--max", f"step_time={limit}", "--markdown", str(tmp_path), "--junit", str(nowhere))
    ran = meshboard(*requested, at=server)
    assert (ran.code, ran.out.count("step_time (max)")) == (code, 1)
    assert ran.err.splitlines() == [
        f"meshboard: --junit {nowhere}: No such file or directory",
        f"meshboard: --markdown {tmp_path}: Is a directory",
    ]


def test_unfinished_gate_replaces_an_older_report(meshboard: Any, server: Any, tmp_path: Any) -> None:
    file = tmp_path / "gate.xml"
    file.write_text(report.format_junit([CheckResult("step_time (max)", "ok", 1.0, None, 9.0, "s")], "gate older", 0.1))
    assert 'errors="0"' in file.read_text()
    ran = meshboard("gate", "j", "--max", "step_time=9s", "--junit", str(file), at=server)
    assert ran.code == ExitCode.WRONG
    (case,) = ElementTree.parse(file).getroot().iter("testcase")
    assert [(content.tag, content.get("message")) for content in case] == [("error", "The gate did not finish.")]
