"""The shell lines of the GitHub action and the GitLab template in `ci/`, run as their runners would run them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.patience import patient
from tests.support.processes import ROOT

ACTION = ROOT / "ci/github/action.yml"
TEMPLATE = ROOT / "ci/gitlab/meshboard.yml"
EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


class Ended(NamedTuple):
    """`step` is the last that ran: the first that failed, where one did."""

    code: int
    step: str
    text: str
    outputs: dict[str, str]


def github(inputs: Mapping[str, str], environment: Mapping[str, str], folder: Path, *, skip: str = "") -> Ended:
    """The composite action's steps, with `inputs` beside its defaults; `folder` is what the build works in."""
    action = yaml.safe_load(ACTION.read_text())
    known = {name: told.get("default") for name, told in action["inputs"].items()}
    missing = [name for name, told in action["inputs"].items() if told.get("required") and name not in inputs]
    assert (missing, set(inputs) - set(known)) == ([], set())
    values = {f"inputs.{name}": str(value) for name, value in {**known, **inputs}.items()}
    values["github.action_path"] = str(ACTION.parent)
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    text = ""
    for step in action["runs"]["steps"]:
        if step["name"] == skip:
            continue
        assert step["shell"] == "bash"
        files["GITHUB_OUTPUT"].write_text("")
        own = {name: _filled(told, values) for name, told in step.get("env", {}).items()}
        assert not EXPRESSION.search(step["run"]), "what comes from outside is handed over as a variable, never as code"
        ran = _bash(step["run"], {**environment, **{n: str(f) for n, f in files.items()}, **own}, folder)
        text += ran.stdout + ran.stderr
        if ran.returncode:
            return Ended(ran.returncode, step["name"], text, {})
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{name}"] = value
    told = {name: _filled(output["value"], values) for name, output in action["outputs"].items()}
    return Ended(0, step["name"], text, told)


def gitlab(variables: Mapping[str, str], environment: Mapping[str, str], folder: Path, *, install: bool) -> Ended:
    """The hidden job's lines, in one shell as GitLab runs them."""
    job: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())[".meshboard-gate"]
    assert set(variables) <= set(job["variables"])
    lines = [*(job["before_script"] if install else []), *job["script"]]
    assert all(isinstance(line, str) for line in lines), "YAML made something else of a line"
    ran = _bash("\n".join(lines), {**environment, **job["variables"], **variables}, folder)
    return Ended(ran.returncode, "script", ran.stdout + ran.stderr, {})


def _filled(text: str, values: Mapping[str, str]) -> str:
    return EXPRESSION.sub(lambda found: values[found[1]], text)


def _bash(script: str, environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "step.sh"
    file.write_text(script)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)]
    return subprocess.run(
        command, env=dict(environment), cwd=folder, capture_output=True, text=True, timeout=patient(240)
    )
