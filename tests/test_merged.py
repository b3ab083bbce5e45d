"""No file has the lines that git leaves where two branches say different things: a page would show both."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT = re.compile(rb"^(<{7}|\|{7}|>{7}) ", re.MULTILINE)


def test_every_merge_was_finished() -> None:
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    files = [path for name in names if name and (path := ROOT / name).is_file()]
    assert files
    assert [str(path.relative_to(ROOT)) for path in files if LEFT.search(path.read_bytes())] == []
