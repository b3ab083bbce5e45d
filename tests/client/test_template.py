"""The GitLab template installs only packages that the build names."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support import ci_pipelines


def test_template_installs_only_named_packages(tmp_path: Path) -> None:
    """A job with a token in its environment runs what it installs."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "asked for: $*"\nexit 9\n')
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = ci_pipelines.run_gitlab_job({}, environment, tmp_path, install=True)
    assert (ended.code, "MESHBOARD_CLIENT" in ended.text, "asked for" in ended.text) == (2, True, False)
    named = "https://board.example/meshboard_client-0.2.0-py3-none-any.whl#sha256=0"
    ended = ci_pipelines.run_gitlab_job({"MESHBOARD_CLIENT": named}, environment, tmp_path, install=True)
    assert (ended.code, ended.text.strip().endswith(named)) == (9, True)
