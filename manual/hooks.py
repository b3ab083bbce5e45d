"""Hooks of mkdocs: navigation, generated pages, and styles of the board.

Pages that are not listed come last in their part of the navigation. Listed pages that do not exist are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from manual.markdown import GLOSSARY, add_anchors, indent_nested_blocks
from manual.reference import generate_pages

STATIC = Path(__file__).resolve().parents[1] / "webapp" / "static"
BOARD_FILES = ("css/tokens.css", "css/base.css", "js/theme.js", "img/mark.svg")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Title of a part: its folder, and its pages in order.
PARTS: dict[str, tuple[str, str]] = {
    "Tutorial": ("tutorial", "index"),
    "How to": (
        "howto",
        "choose-a-layout read-a-verdict own-script script-measurements elsewhere import-a-trace gate-a-build "
        "from-python add-a-host calibrate slurm deploy kubernetes backup upgrade secret-key people notifications",
    ),
    "Explanation": (
        "explanation",
        "strategies traffic collectives architecture planner memory training lab diagnosis timeline queue "
        "gangs slurm failures history access security host-security isolation witness mutations",
    ),
    "Reference": (
        "reference",
        "glossary features pages spec hugging-face tool-layouts trainer scripts api rest errors command settings "
        "host-settings service-limits metrics formulas bounds measurement accuracy figures measured parity gpu",
    ),
    "Development": ("development", "code-map"),
}
START = "index.md"
DEFAULT_PART = "Reference"  # for pages outside the folders above


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generate_pages().items():
        files.append(File.generated(config, path, content=text))
    for name in BOARD_FILES:
        files.append(File.generated(config, f"board/{name}", abs_src_path=str(STATIC / name)))
    config.nav = build_navigation(file.src_uri for file in files.documentation_pages())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to source files by their text, because the site has no source files."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent

    def replace_link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        outside = "://" not in target and not (here / target).resolve().is_relative_to(docs)
        return words if outside else match[0]

    if page.file.src_uri == GLOSSARY:
        markdown = add_anchors(markdown)
    return LINK.sub(replace_link, indent_nested_blocks(markdown))


def list_pages(*parts: str) -> list[str]:
    """Return the pages of some parts of the navigation, or of all."""
    found = (PARTS[part] for part in parts or PARTS)
    return [f"{folder}/{name}.md" for folder, names in found for name in names.split()]


def build_navigation(pages: Iterable[str]) -> list[Any]:
    """Return the navigation in mkdocs' format for pages with paths below docs/."""
    existing = set(pages) - {START}
    folders = {folder for folder, _ in PARTS.values()}
    unlisted = sorted(existing - set(list_pages()))
    result: list[Any] = [START]
    for part, (folder, _) in PARTS.items():
        members = [page for page in list_pages(part) if page in existing]
        members += [page for page in unlisted if page.startswith(f"{folder}/")]
        if part == DEFAULT_PART:
            members += [page for page in unlisted if page.split("/")[0] not in folders]
        if members:
            result.append({part: members})
    return result
