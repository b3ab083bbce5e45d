"""A build in CI: submit, wait, and compare the run with its baseline."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tests.support import ci_pipelines
from tests.support.board import Board
from tests.support.processes import ROOT, scale_timeout

EXAMPLE = ROOT / "client/examples/from_python.py"
SPEC = runpy.run_path(str(EXAMPLE))["SPEC"]
WITHOUT = {**SPEC, "name": "without", "layout": {"tp": 2, "sequence_parallel": False}}
Meshboard = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the commands, the first on the PATH of a build."""
    made = tmp_path_factory.mktemp("bin")
    file = made / "meshboard"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshboard "$@"\n')
    file.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def environment(running_board: Board, commands: Path) -> dict[str, str]:
    """Return the environment of a build, with its token and PATH."""
    own = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}",
        "MESHBOARD_URL": running_board.url,
        "MESHBOARD_TOKEN": token(running_board, "read", "submit", "operate"),
    }
    return {**os.environ, **own}


def token(board: Board, *scopes: str) -> str:
    """Create a token on the account page."""
    return str(board.call("POST", "tokens", {"name": "ci", "scopes": scopes, "days": 1})["token"])


@pytest.fixture(scope="module")
def meshboard(environment: dict[str, str]) -> Meshboard:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["meshboard", *words], env=environment, capture_output=True, text=True, timeout=scale_timeout(120)
        )

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkout of a build with two specs, one without sequence parallelism."""
    made = tmp_path_factory.mktemp("ci")
    (made / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (made / "without.yaml").write_text(yaml.safe_dump(WITHOUT))
    return made


@pytest.fixture(scope="module")
def baseline(meshboard: Meshboard, folder: Path) -> str:
    """Return the baseline run of branch main."""
    ran = meshboard("submit", str(folder / "spec.yaml"), "--follow", "--key", "gitlab-77")
    assert ran.returncode == 0, ran.stderr
    assert "step 5/5 loss" in ran.stderr, "its log comes while it is waited for"
    job = ran.stdout.strip()
    stored = meshboard("baseline", "set", "main", job)
    assert stored.returncode == 0, stored.stderr
    return job


def sent(board: Board, job: str, op: str) -> int:
    """Return the tp payload bytes of all ranks per step."""
    cells = [cell for shown in board.get_job(job)["exit"]["summary"]["cells"].values() for cell in shown]
    wanted = ("step", op, "tp")
    return (
        sum(c["payload_bytes"] for c in cells if (c["phase"], c["op"], c["axis"]) == wanted) // SPEC["train"]["steps"]
    )


def test_github_build_fails_with_axis_and_bytes(
    running_board: Board, meshboard: Meshboard, environment: dict[str, str], folder: Path, baseline: str
) -> None:
    """Without sequence parallelism, all-reduces replace all-gathers, and the gate names both."""
    build = {**environment, "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1", "GITHUB_JOB": "traffic"}
    inputs = {"url": running_board.url, "token": environment["MESHBOARD_TOKEN"], "spec": "without.yaml"}
    ended = ci_pipelines.run_github_action({**inputs, "set-baseline": "main"}, build, folder, skip="Install")
    assert (ended.code, ended.step) == (1, "Gate"), ended.text
    gathered, reduced = (sent(running_board, baseline, op) for op in ("all_gather", "all_reduce"))
    rows = [" ".join(line.split()) for line in ended.text.splitlines()]
    assert f"FAIL bytes.tp.all_gather (exact) 0 B {gathered:,} B -100.00% {gathered:,} B" in rows
    cases = ElementTree.parse(folder / "meshboard-gate.xml").getroot().iter("testcase")
    failed = {case.get("name"): case[0].get("message") for case in cases if case.find("failure") is not None}
    assert failed["bytes.tp.all_gather (exact)"].startswith(f"0 B, baseline {gathered:,} B")  # type: ignore[union-attr]
    assert "calls.tp.all_reduce (exact)" in failed
    summary = (folder / "github_step_summary").read_text()
    assert f"| FAIL | bytes.tp.all_gather (exact) | 0 B | {gathered:,} B |" in summary
    shown = json.loads(meshboard("baseline", "show", "main", "--json").stdout)
    assert [run["job"] for run in shown["runs"]] == [baseline], (
        "a run that failed the gate does not become the baseline"
    )

    without = next(word for word in ended.text.split() if "/jobs/" in word).strip("/").rpartition("/")[2]
    limits = ["--max", "bytes.tp.all_reduce=+0%", "--max", "bytes.tp=+0%", "--max", "loss=+50%"]
    ran = meshboard("gate", without, "--baseline", "main", *limits)
    (row,) = [line for line in ran.stdout.splitlines() if line.startswith("FAIL")]
    assert f"tp all_reduce +{sent(running_board, without, 'all_reduce') - reduced:,} B" in row
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (1, "2 passed, 1 failed")


@pytest.mark.slow
def test_gitlab_build_passes_and_becomes_the_baseline(
    meshboard: Meshboard, environment: dict[str, str], folder: Path, baseline: str
) -> None:
    build = {**environment, "CI_JOB_ID": "77"}
    options = {"MESHBOARD_SET_BASELINE": "release/1", "MESHBOARD_GATE_OPTIONS": "--exact --as-planned"}
    ended = ci_pipelines.run_gitlab_job(options, build, folder, install=False)
    assert ended.code == 0, ended.text
    assert " 0 failed" in ended.text
    (run,) = json.loads(meshboard("baseline", "show", "release/1", "--json").stdout)["runs"]
    assert run["job"] == baseline, "the same build asked again has the job that it had"
    assert "release/1" in meshboard("baseline", "list").stdout
    assert meshboard("baseline", "rm", "release/1").returncode == 0
    missing = meshboard("gate", baseline, "--baseline", "release/1", "--exact")
    assert (missing.returncode, "Use `meshboard baseline set release/1 JOB`" in missing.stderr) == (2, True)


def test_token_allows_only_its_scopes(
    running_board: Board, meshboard: Meshboard, environment: dict[str, str], folder: Path, baseline: str
) -> None:
    def refused(scopes: tuple[str, ...], *words: str) -> str:
        own = {**environment, "MESHBOARD_TOKEN": token(running_board, *scopes)}
        ran = subprocess.run(["meshboard", *words], env=own, capture_output=True, text=True, timeout=scale_timeout(60))
        assert (ran.returncode, ran.stdout) == (3, ""), ran
        return ran.stderr

    spec = str(folder / "spec.yaml")
    assert "needs a token with the scope submit." in refused(("read",), "submit", spec)
    assert "needs a token with the scope operate." in refused(("read", "submit"), "baseline", "rm", "main")
    assert meshboard("baseline", "show", "main").returncode == 0


def test_commands_show_a_run(meshboard: Meshboard, folder: Path, baseline: str) -> None:
    planned = meshboard("plan", str(folder / "spec.yaml"))
    assert (planned.returncode, "sends   tp " in planned.stdout) == (0, True), planned
    watched = meshboard("watch", baseline, "--json")
    shown = json.loads(watched.stdout.splitlines()[-1])
    assert (watched.returncode, shown["step"], shown["status"]) == (0, 5, "succeeded")
    assert shown["bytes_per_s"]["tp"] > 0
    whole, followed = (meshboard("logs", baseline, *options).stdout for options in ([], ["-f"]))
    assert [line for line in followed.splitlines() if "loss" in line] == [
        line for line in whole.splitlines() if "loss" in line
    ]
    compared = meshboard("compare", baseline, baseline)
    assert (compared.returncode, "different job ids" in compared.stderr) == (2, True)
    wrong = meshboard("submit", str(folder / "spec.yaml"), "--set", "layout.tp=3")
    assert (wrong.returncode, "`layout.tp` is 3, but 4 heads are not divisible by 3" in wrong.stderr) == (2, True)


def test_documented_example_shows_the_traffic_of_a_run(
    running_board: Board, environment: dict[str, str], baseline: str
) -> None:
    """The example uses the key of an earlier build, so it finds the same job."""
    own = {**environment, "BUILD": "gitlab-77"}
    ran = subprocess.run([sys.executable, EXAMPLE], env=own, capture_output=True, text=True, timeout=scale_timeout(60))
    shown = ran.stdout.splitlines()
    assert (ran.returncode, shown[1:2]) == (0, [f"{baseline} has succeeded, traffic difference 0 B"]), ran
    assert shown[0].startswith("predicted: ")
    gathered = f"{sent(running_board, baseline, 'all_gather') * SPEC['train']['steps'] // 2:,} B"
    assert f"rank 1 step tp all_gather: {gathered}, {gathered} predicted" in shown
    page = (ROOT / "docs/howto/from-python.md").read_text()
    assert EXAMPLE.read_text().partition("SPEC: JobSpec")[2].partition("\n\n\nif __name__")[0] in page


def test_metered_command_is_reported(running_board: Board, meshboard: Meshboard, commands: Path) -> None:
    """`commands` is the folder of installed packages, which has the meter."""
    meter = commands / "meshboard-meter"
    meter.write_text(f'#!/bin/sh\nexec {sys.executable} -m workers.external_runs "$@"\n')
    meter.chmod(0o755)
    words = ["--name", "by hand", "--", sys.executable, "-c", "print('--help')", "--", "-x"]
    ran = meshboard("meter", *words)
    assert (ran.returncode, "--help" in ran.stdout) == (0, True), ran.stderr
    (job,) = [job for job in json.loads(meshboard("status", "--json").stdout) if job["name"] == "by hand"]
    assert running_board.wait_for_status(job["id"], "succeeded")["reported"]["command"][-2:] == ["--", "-x"]
