"""Check how the diagnosis table judges alarms, and that it can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from jobs.runs.diagnosis import VerdictPayload
from tests.diagnosis import __main__ as command
from tests.diagnosis.case_runner import HANG_S, SLOW_S, CaseResult, judge
from tests.diagnosis.cases import CASES
from tests.diagnosis.faulty import FAULTS
from tests.diagnosis.monitor import DiagnosisMonitor
from tests.support.processes import ROOT

BEGAN = 1_700_000_000.0
SLOW, HANG, LINK = (
    CASES[name] for name in ("slow compute in one rank", "a loader that hangs", "a link cut between two hosts")
)


class ScriptedDiagnosis:
    """A scripted sequence of diagnoses, the last of which repeats."""

    def __init__(self, *words: VerdictPayload) -> None:
        self._words = words

    def diagnose_repeatedly(self, _seconds: float) -> Iterator[VerdictPayload]:
        yield from self._words

    def diagnose(self) -> VerdictPayload:
        return self._words[-1]


def word(after: float, state: str = "well", hang: Any = None, late: Any = None, **more: Any) -> VerdictPayload:
    result = {"time": BEGAN + after, "state": state, "sentence": "", "reason": "", "next": "", **more}
    return cast(VerdictPayload, {**result, "hang": hang, "stragglers": [late] if late else []})


def slow(after: float, rank: int = 2, cause: str = "compute") -> VerdictPayload:
    return word(after, "slow", late={"rank": rank, "cause": cause})


def hung(after: float, ranks: list[int], cause: str, following: str = "") -> VerdictPayload:
    hang = {"cause": cause, "ranks": ranks, "since": BEGAN, "threshold_s": 10.0}
    return word(after, "hung", hang=hang, next=following)


@pytest.mark.parametrize(
    ("case", "ranks", "words", "right"),
    [
        (SLOW, [2], [word(1), slow(9)], True),
        (SLOW, [2], [slow(9, rank=1)], False),
        (SLOW, [2], [slow(9, cause="data")], False),
        (SLOW, [2], [slow(9, rank=1), slow(10)], False),
        (SLOW, [2], [slow(4, rank=1, cause="contention"), slow(9)], True),
        (SLOW, [2], [slow(SLOW_S + 1)], False),
        (SLOW, [2], [word(1), word(2)], False),
        (SLOW, [2], [hung(12, [2], "compute")], False),
        (HANG, [2], [hung(12, [2], "data")], True),
        (HANG, [2], [hung(12, [2, 3], "data")], False),
        (HANG, [2], [hung(12, [2], "compute")], False),
        (HANG, [2], [hung(11 + HANG_S, [2], "data")], False),
        (HANG, [2], [slow(12, cause="data")], False),
        (LINK, [], [hung(12, [], "link", "look at the network of anna and bert")], True),
        (LINK, [], [hung(12, [], "link", "look at the network of anna")], False),
        (LINK, [], [hung(12, [2], "link", "look at the network of anna and bert")], False),
    ],
)
def test_first_alarm_must_be_correct_and_in_time(
    case: Any, ranks: list[int], words: list[VerdictPayload], right: bool
) -> None:
    assert judge(case, ranks, cast(DiagnosisMonitor, ScriptedDiagnosis(*words)), BEGAN).right is right


@pytest.mark.parametrize("name", CASES)
def test_kind_of_a_case_is_a_known_fault(name: str) -> None:
    """The trainer ignores an unknown kind, so its case would wait for nothing."""
    assert CASES[name].kind in (*FAULTS, "")


def test_faults_replace_methods_that_exist() -> None:
    """In another process, because the methods stay replaced."""
    fault = {"kind": "", "ranks": [0], "after": 0, "seconds": 0.0}
    code = f"from tests.diagnosis.faulty import FAULTS\nfor make in FAULTS.values(): make({fault})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", CASES)
def test_different_seeds_draw_different_ranks(name: str) -> None:
    case = CASES[name]
    drawn = [case.ranks(seed) for seed in (1, 2, 3)]
    assert all(rank < case.world for ranks in drawn for rank in ranks)
    if not case.fixed and not case.hosts:
        assert len({ranks[0] for ranks in drawn}) == min(3, case.world)


@pytest.mark.parametrize(
    ("answers", "code", "last"),
    [
        ([True, True], 0, "2 passed, 0 failed"),
        ([True, False], 1, "1 passed, 1 failed"),
        ([None, None], 1, "0 passed, 0 failed"),
    ],
)
def test_skipped_case_does_not_pass(
    answers: list[bool | None],
    code: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request: list[tuple[str, int]] = []

    def try_case(name: str, seed: int) -> CaseResult:
        request.append((name, seed))
        return CaseResult(answers[len(request) - 1], None, "said")

    monkeypatch.setattr(command, "run_case", try_case)
    monkeypatch.setattr(sys, "argv", ["diagnosis", "a killed rank", "--seeds", "2,3"])
    assert command.main() == code
    assert request == [("a killed rank", 2), ("a killed rank", 3)]
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_rejects_an_unknown_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["diagnosis", "a skewed roter"])
    with pytest.raises(SystemExit):
        command.main()
