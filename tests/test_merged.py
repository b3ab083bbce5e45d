"""Check that no file has conflict markers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^(?:<{7}|>{7}|\|{7}) \S|^={7}$", re.MULTILINE)


def _list_files() -> list[Path]:
    """Return the files that a commit of this tree has."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_has_conflict_markers() -> None:
    files = _list_files()
    assert len(files) > 1000
    assert [str(path) for path in files if MARK.search(path.read_text(errors="replace"))] == []


@pytest.mark.parametrize("mark", ["<<<<<<< HEAD", "=======", ">>>>>>> dry", "||||||| 1a2b3c"])
def test_finds_conflict_markers(mark: str) -> None:
    assert MARK.search(f"before\n{mark}\nbehind\n")
    assert not MARK.search(f"before\n  {mark}\nbehind\n")
