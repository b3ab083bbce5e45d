"""What mkdocs is told beside docs/: the order of the pages, the generated ones, and the board's own styles."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from manual.nav import nav
from manual.nested import indent_nested_blocks
from manual.reference import generated
from manual.terms import PAGE, add_anchors

STATIC = Path(__file__).resolve().parents[1] / "webapp" / "static"
OF_THE_BOARD = ("css/tokens.css", "css/base.css", "js/theme.js", "img/mark.svg")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for name in OF_THE_BOARD:
        files.append(File.generated(config, f"board/{name}", abs_src_path=str(STATIC / name)))
    config.nav = nav(file.src_uri for file in files.documentation_pages())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a file of the source is its words alone: the site has no source beside it."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent

    def kept(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        outside = "://" not in target and not (here / target).resolve().is_relative_to(docs)
        return words if outside else match[0]

    if page.file.src_uri == PAGE:
        markdown = add_anchors(markdown)
    return LINK.sub(kept, indent_nested_blocks(markdown))
