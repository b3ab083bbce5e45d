"""Check that the source files named by docs/reference/bounds.md exist."""

from __future__ import annotations

import re

from tests.support.processes import ROOT

PAGE = ROOT / "docs" / "reference" / "bounds.md"
BASE = re.compile(r"The column Code lists paths in `([^`]+)`")


def named_paths() -> list[tuple[str, str]]:
    """Return (base folder of the section, path) for each path in a last column."""
    named = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M):
        base = match[1] if (match := BASE.search(section)) else ""
        cells = (line.strip("| ").rsplit("|", 1)[-1] for line in section.splitlines() if line.startswith("| "))
        named += [(base, path) for cell in cells for path in re.findall(r"`([\w/]+(?:\.\w+|/))`", cell)]
    return named


def test_code_of_each_limit_exists() -> None:
    named = named_paths()
    assert len(named) > 100
    assert [path for base, path in named if not (ROOT / path).exists() and not (ROOT / base / path).exists()] == []
