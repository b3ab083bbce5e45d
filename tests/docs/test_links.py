"""Links between Markdown files, to headings, pictures, and docs/ files named in code."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from manual.reference import PAGES
from manual.reference.markdown import get_anchor
from tests.support.processes import ROOT

LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w./-])docs/[\w/.-]+\.(?:md|png|svg)\b")
FROM_PAGES = re.compile(r"{% url 'docs-file' '([^']*)/' %}(#[\w-]+)?")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
SOURCES = (".py", ".md", ".html", ".yml", ".toml", ".js", ".sh", "Makefile", "Dockerfile")


@cache
def list_files() -> list[Path]:
    """Return files that are in git or not ignored."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    content = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in content.splitlines() if (ROOT / line).is_file()]


def list_pages() -> list[Path]:
    return [f for f in list_files() if f.suffix == ".md" and "vendor" not in f.parts]


def list_dead_links(text: str, here: Path) -> list[str]:
    """Return dead links in the Markdown of a file in the folder `here`."""
    return [target for target in LINK.findall(FENCE.sub("", text)) if not _is_valid_link(target, here)]


def _is_valid_link(target: str, here: Path) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    path, _, heading = target.partition("#")
    found = (here / path).resolve()
    if (
        found.is_relative_to(ROOT)
        and str(found.relative_to(ROOT / "docs" if found.is_relative_to(ROOT / "docs") else ROOT)) in PAGES
    ):
        return True  # the code writes it; `make docs` knows its headings
    if not found.exists():
        return False
    return not heading or found.suffix != ".md" or heading in list_headings(found)


@cache
def list_headings(path: Path) -> set[str]:
    lines = re.findall(r"^#{1,6} (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {get_anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)) for line in lines}


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_work(page: Path) -> None:
    here = ROOT if page.name == "README.md" and page.parent == ROOT else page.parent
    assert list_dead_links(page.read_text(), here) == []


def test_pages_named_in_code_exist() -> None:
    named = {
        (str(file.relative_to(ROOT)), name)
        for file in list_files()
        if file.name.endswith(SOURCES) and "vendor" not in file.parts and file != Path(__file__)
        for name in NAMED.findall(file.read_text(errors="replace"))
    }
    assert len(named) > 40
    there = {f"docs/{page}" for page in PAGES}
    assert sorted((file, name) for file, name in named if name not in there and not (ROOT / name).exists()) == []


def test_links_from_templates_lead_to_headings() -> None:
    links = [
        (str(file.relative_to(ROOT)), f"{page}.md{heading}")
        for file in list_files()
        if file.suffix == ".html"
        for page, heading in FROM_PAGES.findall(file.read_text())
    ]
    assert len(links) >= 10
    assert [(file, target) for file, target in links if not _is_valid_link(target, ROOT / "docs")] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "[a](nothing.md)",
        "![a](pictures/nothing.png)",
        "[a](../nothing.py)",
        "[a](howto/deploy.md#nothing)",
        "[`a` [b]](nothing.md)",
    ],
)
def test_detects_a_dead_link(wrong: str) -> None:
    assert len(list_dead_links(f"# Start\n\n{wrong}\n", ROOT / "docs")) == 1
    assert (
        list_dead_links(
            "```\n[a](nothing.md)\n```\n[b](howto/deploy.md#tls) [c](reference/spec.md) [d](https://a.example)",
            ROOT / "docs",
        )
        == []
    )
