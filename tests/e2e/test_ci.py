"""The story of a build: submit and wait, hold the run to its baseline, and fail where an axis sends otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.support.board import Board

SPEC = {
    "name": "baseline",
    "model": {"preset": "gpt-tiny"},
    "layout": {"tp": 2, "sequence_parallel": True},
    "train": {"steps": 5},
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ci") / "spec.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    return file


def meshboard(board: Board, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MESHBOARD_URL": board.url, "MESHBOARD_TOKEN": board.up["api_token"]}
    command = [sys.executable, "-m", "meshboard", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_build_passes_and_then_fails_by_axis_and_bytes(running_board: Board, spec: Path, tmp_path: Path) -> None:
    planned = meshboard(running_board, "plan", str(spec))
    assert (planned.returncode, "sends   tp " in planned.stdout) == (0, True), planned
    first = meshboard(running_board, "submit", str(spec), "--wait", "--key", "build-1")
    assert first.returncode == 0, first.stderr
    baseline = first.stdout.strip()
    assert meshboard(running_board, "submit", str(spec), "--key", "build-1").stdout.strip() == baseline
    held = meshboard(running_board, "gate", baseline, "--baseline", baseline, "--exact", "--as-planned")
    assert held.returncode == 0, held.stdout
    assert held.stdout.strip().endswith(" 0 failed")

    without = ["--set", "layout.sequence_parallel=false", "--set", "name=without", "--wait"]
    other = meshboard(running_board, "submit", str(spec), *without)
    assert other.returncode == 0, other.stderr
    junit = tmp_path / "gate.xml"
    failed = meshboard(
        running_board, "gate", other.stdout.strip(), "--baseline", baseline, "--exact", "--junit", str(junit)
    )
    assert failed.returncode == 1
    cells = [c for told in running_board.job(baseline)["exit"]["summary"]["cells"].values() for c in told]
    sent = sum(c["payload_bytes"] for c in cells if (c["phase"], c["op"]) == ("step", "all_gather")) // 5
    rows = [" ".join(line.split()) for line in failed.stdout.splitlines()]
    assert f"FAIL bytes.tp.all_gather (exact) 0 B {sent:,} B -100.00% {sent:,} B" in rows
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    named = {case.get("name") for case in cases if case.find("failure") is not None}
    assert {"bytes.tp.all_gather (exact)", "calls.tp.all_reduce (exact)"} <= named

    wrong = meshboard(running_board, "submit", str(spec), "--set", "layout.tp=3")
    assert (wrong.returncode, "layout.tp: num_heads 4 is not divisible by tp 3" in wrong.stderr) == (2, True)
