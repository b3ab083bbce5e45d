"""Run the shell lines of the GitHub action and of the GitLab template in `ci/`, as their runners do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.processes import ROOT, scale_timeout

ACTION = ROOT / "ci/github/action.yml"
TEMPLATE = ROOT / "ci/gitlab/meshboard.yml"
EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


class PipelineResult(NamedTuple):
    """Result of a pipeline. `step` is the first step that failed, or the last step."""

    code: int
    step: str
    text: str
    outputs: dict[str, str]


def run_github_action(
    inputs: Mapping[str, str], environment: Mapping[str, str], folder: Path, *, skip: str = ""
) -> PipelineResult:
    """Run the steps of the composite action in `folder`, with the default of each missing input."""
    action = yaml.safe_load(ACTION.read_text())
    defaults = {name: declared.get("default") for name, declared in action["inputs"].items()}
    missing = [name for name, declared in action["inputs"].items() if declared.get("required") and name not in inputs]
    assert (missing, set(inputs) - set(defaults)) == ([], set())
    values = {f"inputs.{name}": str(value) for name, value in {**defaults, **inputs}.items()}
    values["github.action_path"] = str(ACTION.parent)
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    text = ""
    for step in action["runs"]["steps"]:
        if step["name"] == skip:
            continue
        assert step["shell"] == "bash"
        files["GITHUB_OUTPUT"].write_text("")
        variables = {name: _substitute(value, values) for name, value in step.get("env", {}).items()}
        assert not EXPRESSION.search(step["run"]), "values from outside are passed as variables, never as code"
        done = _run_bash(step["run"], {**environment, **{n: str(f) for n, f in files.items()}, **variables}, folder)
        text += done.stdout + done.stderr
        if done.returncode:
            return PipelineResult(done.returncode, step["name"], text, {})
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            name, _, value = line.partition("=")
            values[f"steps.{step['id']}.outputs.{name}"] = value
    outputs = {name: _substitute(output["value"], values) for name, output in action["outputs"].items()}
    return PipelineResult(0, step["name"], text, outputs)


def run_gitlab_job(
    variables: Mapping[str, str], environment: Mapping[str, str], folder: Path, *, install: bool
) -> PipelineResult:
    """Run the lines of the hidden job in one shell."""
    job: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())[".meshboard-gate"]
    assert set(variables) <= set(job["variables"])
    lines = [*(job["before_script"] if install else []), *job["script"]]
    assert all(isinstance(line, str) for line in lines), "YAML parsed a line as another type"
    done = _run_bash("\n".join(lines), {**environment, **job["variables"], **variables}, folder)
    return PipelineResult(done.returncode, "script", done.stdout + done.stderr, {})


def _substitute(text: str, values: Mapping[str, str]) -> str:
    return EXPRESSION.sub(lambda match: values[match[1]], text)


def _run_bash(script: str, environment: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "step.sh"
    file.write_text(script)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)]
    return subprocess.run(
        command, env=dict(environment), cwd=folder, capture_output=True, text=True, timeout=scale_timeout(240)
    )
