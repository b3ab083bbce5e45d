"""A rank reports its error in a format that torchrun and Meshboard's launcher read."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from workers.host.rank_files import read_rank_error
from workers.meter.rank_exit import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    _run_main,
    fail,
    report_error,
    report_exception,
)
from workers.meter.script import Script, run_script


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


def test_reports_exception_with_type_message_and_traceback(error_file: Path) -> None:
    before = time.time()
    try:
        int("boom")
    except ValueError as error:
        report_exception(error)
    message, trace, moment = read_rank_error(error_file)
    assert message == "ValueError: invalid literal for int() with base 10: 'boom'"
    assert 'int("boom")' in trace
    assert moment is not None
    assert before <= moment <= time.time(), "to the microsecond: it says which rank was first"
    assert ProcessFailure(0, 1, 1, str(error_file)).timestamp == int(moment), "plain torchrun reads it as well"


def test_fail_reports_to_stderr_and_torchrun(error_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("train.data: there is no 'x.bin'", 2) == 2
    assert capsys.readouterr().err == "error: train.data: there is no 'x.bin'\n"
    assert read_rank_error(error_file)[0] == "train.data: there is no 'x.bin'"


def test_uncaught_exception_ends_rank_with_its_message(error_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_main(lambda: 1 // 0) == 1
    assert read_rank_error(error_file)[0] == "ZeroDivisionError: integer division or modulo by zero"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_report_is_bounded_and_keeps_end_of_traceback(error_file: Path) -> None:
    report_error("m" * 10**6, "t" * 10**6 + "last")
    content = json.loads(error_file.read_text())["message"]
    assert len(content["message"]) == MAX_MESSAGE_CHARS
    assert len(content["extraInfo"]["py_callstack"]) == MAX_TRACEBACK_CHARS
    assert content["extraInfo"]["py_callstack"].endswith("last")


def test_unwritable_error_file_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent/error.json"))
    assert fail("no such data", 2) == 2
    assert capsys.readouterr().err.startswith("error: no such data\n")


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("raise SystemExit('bad data')", 1, "bad data"),
        ("raise SystemExit(3)", 3, None),
        ("raise SystemExit", 0, None),
        ("print('progress'); raise ValueError('boom')", 1, "ValueError: boom"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", 1, "E: <exception str() failed>"),
        ("def f(): f()\nf()", 1, "RecursionError: maximum recursion depth exceeded"),
        ("x = (", 1, "SyntaxError: '(' was never closed"),
    ],
)
def test_script_exits_as_under_python_and_reports_its_error(
    error_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, code: int, message: str | None
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    file = tmp_path / "script.py"
    file.write_text(source)
    assert run_script(Script(file, None, "script.py", [], tmp_path, None)) == code
    assert error_file.exists() == (message is not None)
    assert message is None or read_rank_error(error_file)[0].startswith(message)
