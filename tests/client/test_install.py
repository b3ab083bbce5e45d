"""The client in a clean environment: as the GitHub action installs it, without Django and torch, typed, completed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.ci_pipelines import ACTION
from tests.support.processes import ROOT, base_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 120.0  # on two busy cores; a board's own packages take minutes
TYPED = """
from meshboard import Client, Job

def build(board: Client, spec: dict[str, object]) -> Job:
    job = board.wait(board.submit(spec, key="build-17").id, timeout_s=3600)
    reveal_type(job.succeeded)
    reveal_type(board.results(job.id)["off_bytes"])
    board.results(job.id)["of_bytes"]
    job.nothing
    return job
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """After the action's step, on a machine whose Python takes no packages, as Debian's does (PEP 668)."""
    made = tmp_path_factory.mktemp("clean")
    own = {name: value for name, value in base_environment().items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    own |= {"PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}", "PIP_REQUIRE_VIRTUALENV": "1"}
    own |= {"RUNNER_TEMP": str(made), "GITHUB_PATH": str(made / "path")}
    own["HERE"] = str(_downloaded(tmp_path_factory.mktemp("action")))
    (step,) = [one for one in yaml.safe_load(ACTION.read_text())["runs"]["steps"] if one["name"] == "Install"]
    began = time.monotonic()
    subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], env=own, cwd=made, check=True)
    assert time.monotonic() - began < SECONDS
    (added,) = (made / "path").read_text().splitlines()
    return {**own, "PATH": f"{added}:{own['PATH']}"}


def find_python(environment: dict[str, str]) -> str:
    """Return the Python that runs the command."""
    command = Path(shutil.which("meshboard", path=environment["PATH"]) or "")
    return command.read_text().splitlines()[0].removeprefix("#!")


def _downloaded(folder: Path) -> Path:
    """Return the folder of the action in a copy of the repository."""
    names = subprocess.check_output(["git", "ls-files", "ci", "client", "VERSION"], cwd=ROOT, text=True).splitlines()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder / ACTION.parent.relative_to(ROOT)


def output(environment: dict[str, str], *words: str, **more: str) -> str:
    ran = subprocess.run(words, env={**environment, **more}, cwd="/", capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_has_few_dependencies(environment: dict[str, str]) -> None:
    content = json.loads(output(environment, find_python(environment), "-m", "pip", "list", "--format", "json"))
    names = {package["name"].lower() for package in content}
    assert "meshboard-client" in names
    assert names & {"django", "torch", "numpy", "celery", "redis", "meshboard"} == set()
    assert len(names) < 30, sorted(names)


def test_installation_keeps_the_python_of_a_build(environment: dict[str, str]) -> None:
    added = environment["PATH"].split(":")[0]
    assert [file.name for file in Path(added).iterdir()] == ["meshboard"]


def test_command_runs_and_has_completion(environment: dict[str, str]) -> None:
    assert "Exit codes: 0 success" in " ".join(output(environment, "meshboard", "--help").split())
    requested = {"_MESHBOARD_COMPLETE": "complete_bash", "COMP_WORDS": "meshboard ba", "COMP_CWORD": "1"}
    assert output(environment, "meshboard", **requested).split() == ["baseline"]
    for shell in ("bash", "zsh", "fish"):
        assert "_MESHBOARD_COMPLETE" in output(environment, "meshboard", _MESHBOARD_COMPLETE=f"source_{shell}")


def test_package_exports_types(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "build.py"
    file.write_text(TYPED)
    python = ["--python-executable", find_python(environment)]
    command = [sys.executable, "-m", "mypy", "--strict", *python, "--config-file=", str(file)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert 'Revealed type is "bool"' in ran.stdout, ran.stdout + ran.stderr
    assert '"Job" has no attribute "nothing"' in ran.stdout
    assert 'Revealed type is "int | None"' in ran.stdout
    assert 'TypedDict "Results" has no key "of_bytes"' in ran.stdout
    assert "Found 2 errors" in ran.stdout
