"""Output errors give one line and an exit code."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from meshboard import text_reports
from meshboard.commands.app import ExitCode
from tests.client.conftest import FakeServer, Ran
from tests.client.test_api import JOB

Meshboard = Callable[..., Ran]


def test_reports_every_error_in_one_line(
    meshboard: Meshboard, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.respond((200, {"id": "j"}))
    ran = meshboard("status", "j", at=server)
    assert (ran.code, ran.out, ran.err.count("\n")) == (ExitCode.BROKEN, "", 1)
    assert "KeyError: 'status'" in ran.err


def printed(words: str, also: dict[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **also}
    program = [sys.executable, "-m", "meshboard", *words.split()]
    return subprocess.run(program, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **how)


def test_reports_a_full_disk_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = printed("logout --json", {"MESHBOARD_URL": "", "MESHBOARD_TOKEN": ""}, stdout=full)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (
        ExitCode.BROKEN,
        "meshboard: Cannot write the output: No space left on device",
    )
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


def test_escapes_characters_that_the_terminal_lacks(
    meshboard: Meshboard, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.respond_at("jobs/j", {**JOB, "name": "\u00fc\u6f22"})
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="latin-1"))
    assert meshboard("status", "j", at=server).code == ExitCode.OK
    assert content.getvalue().decode("latin-1").rstrip() == "j  running      \u00fc\\u6f22"


def test_closed_pipe_is_not_a_failed_job(server: FakeServer) -> None:
    """The output ends silently if the reader has closed the pipe or no output is open."""
    server.respond_at("jobs", [{**JOB, "owner": "o", "project": "p", "created": "c", "name": "n" * 200}] * 200)
    environment = {"MESHBOARD_URL": server.url, "MESHBOARD_TOKEN": "t"}
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        ran = printed("status", environment, stdout=nobody)
    assert (ran.returncode, ran.stderr) == (ExitCode.BROKEN, "")
    ran = printed("status", environment, preexec_fn=lambda: os.close(1))
    assert (ran.returncode, ran.stderr) == (
        ExitCode.BROKEN,
        "meshboard: Cannot write the output: standard output is closed\n",
    )


def test_plan_and_search_show_intervals() -> None:
    sure = {"interval": {"share": 0.25, "words": "data sheet, ±25%"}}
    heavy = {"share": 1.0, "words": "tensors counted, ±100%"}
    time = {"step_s": 0.8, "parts": [{"name": "compute", "seconds": 0.8}], **sure}
    where = {"fits": True, "stages": [], "cluster": {"name": "H100"}}
    content = text_reports.format_plan({"time": time, "peak_memory_bytes": 2**30, "memory_interval": heavy, **where})
    assert "        600 ms to 1 s: data sheet, ±25%\n" in content
    assert "        0 B to 2 GiB: tensors counted, ±100%\n" in content
    estimate = {"time": time, "peak_memory_bytes": 2**30, "memory_interval": heavy, **where}
    for more, words in (({}, ": fits H100"), ({"tight": True}, ": might not fit"), ({"fits": False}, ": does not fit")):
        assert words in text_reports.format_plan({**estimate, **more})
    layout = dict.fromkeys(text_reports.AXES, 1) | {"zero": 0, "schedule": "1f1b", "recompute": "none"}
    found = {"layout": layout, "micro_batch_size": 1, "step_s": 9.0, "memory_bytes": 2**30, "runnable": True}
    old, new = (
        text_reports.format_layouts({"best": [{**found, **more}]}) for more in ({}, {"interval": {"share": 9.0}})
    )
    assert "900 ms to 90 s" in new
    assert " to " not in old, "an older board returns no interval"


def test_plan_has_no_terminal_escapes() -> None:
    hostile = "\x1b]0;yours\x07\x1b[31mred"
    estimate = {
        "time": {"step_s": 1.0, "parts": [{"name": hostile, "seconds": 1.0}]},
        "stages": [{"step_bytes": {hostile: 8}}],
        "peak_memory_bytes": 8,
        "fits": True,
        "cluster": {"name": hostile},
    }
    content = text_reports.format_plan(cast(Any, estimate))
    assert "\x1b" not in content
    assert content.count("red") == 3
