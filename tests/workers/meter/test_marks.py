"""A script marks its steps with `meshboard.step`, which does nothing outside Meshboard."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import meshboard
from workers.meter import marks
from workers.meter.marks import CLIENT_NAME, MODULE_NAME, provide_client, register_marks
from workers.meter.recorder import Recorder
from workers.meter.script_steps import StepTracker


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the items of a script whose marks are registered."""
    items: list[Any] = []
    tracker = StepTracker(Recorder(0), items.append)
    monkeypatch.setitem(sys.modules, MODULE_NAME, ModuleType(MODULE_NAME))  # restored after the test
    register_marks(tracker)
    items.append(tracker)
    return items


def get_steps(sent: list[Any]) -> list[Any]:
    tracker, *_ = sent
    tracker.close()
    tracker.poll()
    return [item for item in sent[1:] if item["kind"] == "step"]


def test_mark_does_nothing_without_the_meter() -> None:
    assert MODULE_NAME not in sys.modules
    with meshboard.step(tokens=3):
        pass
    meshboard.step()


def test_block_is_a_step(sent: list[Any]) -> None:
    for _ in range(2):
        with meshboard.step(tokens=128, samples=4):
            pass
    assert [(item["step"], item["tokens"], item["samples"]) for item in get_steps(sent)] == [(1, 128, 4), (2, 128, 4)]


def test_block_that_raises_is_no_step(sent: list[Any]) -> None:
    with pytest.raises(KeyError), meshboard.step():
        raise KeyError
    assert get_steps(sent) == []


@pytest.mark.parametrize("tokens", [-1, 1.5, "many", float("nan"), 2**60])
def test_invalid_count_is_ignored_with_one_note(
    sent: list[Any], tokens: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        with meshboard.step(tokens=tokens):
            pass
    assert [item["tokens"] for item in get_steps(sent)] == [None] * 3
    note = capsys.readouterr().err
    assert note.count("meshboard: `tokens` of a step is") == 1
    assert "Use a whole number from 0" in note


def test_host_without_the_client_has_the_module(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    monkeypatch.delitem(sys.modules, CLIENT_NAME)
    monkeypatch.setattr(marks.importlib.util, "find_spec", lambda _name: None)
    module = sys.modules[MODULE_NAME]
    provide_client(module)
    assert sys.modules[CLIENT_NAME] is module


def test_module_of_the_script_with_this_name_stays(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    monkeypatch.delitem(sys.modules, CLIENT_NAME)
    provide_client(sys.modules[MODULE_NAME])
    assert CLIENT_NAME not in sys.modules, "Python finds it by its path"
