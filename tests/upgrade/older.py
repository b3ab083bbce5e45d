"""The files of the version before, from this checkout's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT

BEFORE = "7c4c94f93bf123e6bff5abcdf1308ac2b65e28b3"  # the last of what 0.1.0 became


def files_before(folder: Path) -> Path:
    """All of them, in this folder."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", BEFORE], capture_output=True, check=False).returncode:
        pytest.skip(f"this checkout's history does not reach back to {BEFORE[:7]}")
    packed = subprocess.run([*git, "archive", BEFORE], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder
