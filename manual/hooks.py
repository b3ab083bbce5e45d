"""Hooks of mkdocs: navigation, generated pages, and styles of the board."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from manual.markdown import GLOSSARY, add_anchors, indent_nested_blocks
from manual.navigation import build_navigation
from manual.reference import generate_pages

STATIC = Path(__file__).resolve().parents[1] / "webapp" / "static"
BOARD_FILES = ("css/tokens.css", "css/base.css", "js/theme.js", "img/mark.svg")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


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
