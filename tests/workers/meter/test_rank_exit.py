"""A rank reports its error for torchrun, and a full disk does not end the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.support.processes import scale_timeout
from workers.host.rank_files import read_rank_error
from workers.meter.rank_exit import (
    MAX_MESSAGE_CHARS,
    MAX_TRACEBACK_CHARS,
    DiskFullTolerantWriter,
    _run_main,
    fail,
    report_error,
    report_exception,
)
from workers.meter.script import Script, run_script

PRINTS = """
from workers.meter.rank_exit import run_and_exit

def main():
    print("a line" * 10_000)
    return 0

run_and_exit(main)
"""


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


def test_exception_group_reports_its_first_exception(error_file: Path) -> None:
    """The message was "ExceptionGroup: loaders (2 sub-exceptions)", without any reason."""
    inner = ExceptionGroup("shards", [ValueError("shard 3 is empty"), OSError("disk")])
    report_exception(ExceptionGroup("loaders", [inner, KeyError("x")]))
    message, trace, _ = read_rank_error(error_file)
    assert message == "ExceptionGroup: loaders (2 sub-exceptions), first ValueError: shard 3 is empty"
    assert "KeyError" in trace


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


def test_rank_survives_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-u", "-c", PRINTS], stdout=full, stderr=full, timeout=scale_timeout(60), check=False
        )
    assert ran.returncode == 0


def test_reports_lost_bytes_when_disk_has_space_again(tmp_path: Path) -> None:
    log = (tmp_path / "log").open("wb")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    output = DiskFullTolerantWriter(descriptor, "stdout")
    assert output.write(b"nobody reads this\n") == 18
    assert output.write(b"nor this\n") == 9
    os.dup2(log.fileno(), descriptor)
    output.write(b"step 3\n")
    output.write(b"step 4\n")
    os.close(descriptor)
    result = (tmp_path / "log").read_bytes()
    assert result == b"\n[27 bytes of output are missing: the disk was full]\nstep 3\nstep 4\n"
