"""The files of the version before, from this checkout's own history."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT

BEFORE = "06665c78028997b355728c05e93c5422b8f50154"  # the first commit with the initial migration of version 0.2.0


def files_before(folder: Path) -> Path:
    """All of them, in this folder."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", BEFORE], capture_output=True, check=False).returncode:
        pytest.skip(f"this checkout's history does not reach back to {BEFORE[:7]}")
    packed = subprocess.run([*git, "archive", BEFORE], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(folder, filter="data")
    return folder
