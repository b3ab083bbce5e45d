"""Check that a call of `make gpu` ends in time and runs each part, with a simulated clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import running
from benchmarks.gpu.machine import Fingerprint
from benchmarks.gpu.results import PartResult
from benchmarks.gpu.running import (
    GRACE_S,
    RETRY_FACTOR,
    TOTAL_S,
    BenchmarkPart,
    compute_time_limit,
    format_duration,
    run_parts,
)
from benchmarks.gpu.table import format_lines
from tests.benchmarks.test_gpu import planned

UNDER_S = 25 * 60.0
HERE = Fingerprint(torch="2", device="none", count=1, commit="c", small=True)


@dataclass
class Played:
    """Calls whose programs take the seconds of `takes`, and are cut by the runner."""

    folder: Path
    takes: dict[str, float]
    untried: list[str] = field(default_factory=list)
    time_s: float = 0.0
    limits: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def program(self, argv: Sequence[str], log: Path, limit_s: float) -> int | None:
        name = log.stem
        self.limits[name] = limit_s
        assert float(argv[argv.index("--limit") + 1]) == limit_s
        log.write_text("")
        self.time_s += min(self.takes[name], limit_s)
        if self.takes[name] > limit_s:
            return None
        found = {"measured": {}, "beside": {}, "wrong": [], "notes": [], "untried": self.untried}
        Path(argv[argv.index("--out") + 1]).write_text(json.dumps(found))
        return 0

    def call(self, parts: list[BenchmarkPart], total_s: float = TOTAL_S) -> list[PartResult]:
        self.limits.clear()
        self.said.clear()
        until = self.time_s + total_s
        return run_parts(parts, self.folder, HERE, self.said.append, until, fresh=False)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    plays = Played(tmp_path, {})
    monkeypatch.setattr(running, "read_clock", lambda: plays.time_s)
    monkeypatch.setattr(running, "_run_program", plays.program)
    monkeypatch.setattr(running, "list_busy_gpus", lambda _gpus: [])
    return plays


def part(name: str, expected_s: float, limit_s: float = 1e9, *, of_pieces: bool = False) -> BenchmarkPart:
    return BenchmarkPart(name, name, ("program",), expected_s, limit_s, of_pieces=of_pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 600), st.floats(0, 3000)), min_size=1, max_size=40), st.floats(60, 3000))
def test_call_ends_in_time_and_runs_each_part(parts: list[tuple[float, float]], total_s: float) -> None:
    """Check that each part gets its expected time, or its share if time is short."""
    left, expected = total_s, [one for one, _ in parts]
    scarce = min(1.0, total_s / sum(expected))
    for number, (own, takes) in enumerate(parts):
        has = compute_time_limit(own, expected[number + 1 :], left)
        assert has <= left + 1e-6
        assert has >= own * scarce - 1e-6
        left -= min(takes, has)
    assert left >= -1e-6


def test_call_ends_within_25_minutes(played: Played) -> None:
    parts = [p for p in planned(1, "h100") if not p.skip]
    played.takes = {p.name: 1e6 for p in parts}
    results = played.call(parts)
    assert played.time_s + GRACE_S < UNDER_S
    assert played.limits.keys() == {p.name for p in parts}, "none takes the turn of another"
    assert {result["state"] for result in results} <= {"cut", "failed"}


def test_one_gpu_has_the_expected_time_of_each_part(played: Played) -> None:
    parts = [replace(p, within={}) for p in planned(1, "h100") if not p.skip]
    assert sum(p.expected_s for p in parts) < TOTAL_S
    played.takes = {p.name: p.expected_s for p in parts} | {"layouts": 1e6}
    results = played.call(parts)
    assert [result["part"] for result in results if result["state"] != "passed"] == ["layouts"]
    assert played.limits["layouts"] >= TOTAL_S - sum(p.expected_s for p in parts)


def test_early_end_of_a_part_leaves_time_for_others(played: Played) -> None:
    parts = [part("a", 100), part("b", 100), part("c", 100)]
    played.takes = {"a": 10, "b": 1e6, "c": 140}
    results = played.call(parts, 300)
    assert [result["state"] for result in results] == ["passed", "cut", "passed"]
    assert played.limits == {"a": 100, "b": 145, "c": 145}


def test_cut_part_runs_first_with_more_time(played: Played) -> None:
    parts = [part("a", 30), part("slow", 60), part("b", 30), part("layouts", 60, of_pieces=True)]
    played.takes = {"a": 30, "slow": 150, "b": 30, "layouts": 1e6}
    first = played.call(parts, 200)
    had_s = played.limits["slow"]
    assert [result["state"] for result in first] == ["passed", "cut", "passed", "cut"]
    assert f"this call had {had_s:.0f} s for it; the next has more" in first[1]["why"]
    row = "Cut for lack of time; run the command again to give them more (2): slow, layouts."
    assert row in list(format_lines(first))
    played.takes["new"] = 30
    second = played.call([part("new", 30), *parts], 200)
    assert list(played.limits) == ["slow", "new", "layouts"], "first what was cut, and pieces last"
    assert played.limits["slow"] > had_s
    assert second[2]["state"] == "cut"


def test_cut_parts_get_more_time_if_all_were_cut(played: Played) -> None:
    """Otherwise a slow machine would cut each part at the same second in each call."""
    parts = [part(name, 100) for name in "abcd"]
    played.takes = dict.fromkeys("abcd", 120)
    calls = 0
    while any(result["state"] == "cut" for result in played.call(parts, 240)):
        calls += 1
        assert calls < 10
    assert compute_time_limit(100, [100] * 3, 240) < 120 <= min(RETRY_FACTOR * 60, 240 / 2)


def test_names_pieces_that_did_not_run_and_continues(played: Played) -> None:
    played.takes, played.untried = {"layouts": 10}, ["tp2", "pp2"]
    (result,) = played.call([part("layouts", 60, of_pieces=True)])
    assert (result["state"], result["why"]) == (
        "cut",
        "out of time before 2; run the command again: tp2, pp2",
    )
    played.untried = []
    assert [result["state"] for result in played.call([part("layouts", 60, of_pieces=True)])] == ["passed"]


def test_part_that_exceeds_its_maximum_time_fails(played: Played) -> None:
    played.takes = {"a": 1e6}
    (result,) = played.call([part("a", 30, limit_s=240)], 1000)
    assert (result["state"], result["seconds"]) == ("failed", 240)


def test_prints_the_remaining_time(played: Played) -> None:
    parts = [part("a", 100), BenchmarkPart("none", "", skip="no GPU"), part("b", 100)]
    played.takes = {"a": 40.0, "b": 41.0}
    played.call(parts)
    assert played.said == [
        "3 parts: 0 passed before, 1 skipped, 2 to run in at most 24 min 00 s",
        "a: passed in 40 s (23 min 20 s left for 1 more)",
        "none: skipped in 0 s: no GPU",
        "b: passed in 41 s (22 min 39 s left for 0 more)",
    ]
    played.call(parts)
    assert played.said[:2] == [
        "3 parts: 2 passed before, 1 skipped, 0 to run in at most 24 min 00 s",
        "a: passed before in 40 s",
    ]
    assert [format_duration(seconds) for seconds in (-1, 59.9, 60)] == ["0 s", "59 s", "1 min 00 s"]
