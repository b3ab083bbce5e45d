"""Changes to Markdown for the site: indentation of nested blocks, and anchors and search entries of the glossary."""

from __future__ import annotations

import json
import re
from pathlib import Path

LEVEL = 4  # spaces
FENCE = re.compile(r"( *)(`{3,})(.*)")
ITEM = re.compile(r"(?:\d+\.|[-*]) ")
GLOSSARY = "reference/glossary.md"
ADDRESS = "reference/glossary/"
BOOST = 20  # weight of a term's entry; other entries weigh 1
RANKING = {  # lines of mkdocs' search worker, and their replacements
    "this.field('title');": "this.field('title', { boost: 10 });",
    "this.add(doc);": "this.add(doc, { boost: doc.boost || 1 });",
}
ROW = re.compile(r"^\| (?!Term \|)([^|\n]+) \| ([^|\n]+) \|", re.M)


def indent_nested_blocks(markdown: str) -> str:
    """Return the text with blocks in list items indented for Python-Markdown."""
    result: list[str] = []
    fence: tuple[int, str] | None = None  # indentation and ticks of the open fence
    has_block = False  # whether the current list item has a block besides its first paragraph
    for line in markdown.split("\n"):
        match = FENCE.fullmatch(line)
        indent = len(line) - len(line.lstrip(" "))
        if fence is not None:
            outer, ticks = fence
            closes = match is not None and match[2] == ticks and indent == outer and not match[3].strip()
            result.append(line if not outer else "" if closes else _code_line(line, outer))
            fence = None if closes else fence
        elif match is not None:
            fence = indent, match[2]
            result.append("" if indent else line)
            has_block = indent > 0
        elif not indent:
            if has_block and ITEM.match(line):
                result.append("")
            has_block = has_block and not line
            result.append(line)
        else:
            text = line[indent:]
            previous = result[-1].lstrip(" ") if result else ""
            is_table = text.startswith("|")
            has_block = has_block or not previous or is_table
            if previous and has_block and (is_table != previous.startswith("|") or _starts_list(previous, text)):
                result.append("")
            result.append(" " * (_levels(indent) * LEVEL) + text)
    return "\n".join(result)


def _code_line(line: str, indent: int) -> str:
    return " " * (_levels(indent) * LEVEL + LEVEL) + line[indent:] if line.strip() else ""


def _starts_list(previous: str, text: str) -> bool:
    return bool(ITEM.match(text)) and not ITEM.match(previous)


def _levels(indent: int) -> int:
    return -(-indent // LEVEL)


def get_term_anchor(term: str) -> str:
    """Return the id of a term in the glossary page."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def add_anchors(markdown: str) -> str:
    """Return the text of the glossary with an anchor in each row."""
    return ROW.sub(lambda row: row[0].replace("| ", f'| <a id="{get_term_anchor(row[1])}"></a>', 1), markdown)


def add_to_search(folder: Path, glossary: str) -> None:
    """Add an entry per term to the search index, and let the search worker rank these entries first."""
    index, worker = folder / "search_index.json", folder / "worker.js"
    content = json.loads(index.read_text())
    content["docs"] += [
        {"location": f"{ADDRESS}#{get_term_anchor(term)}", "title": term, "text": meaning, "boost": BOOST}
        for term, meaning in ROW.findall(glossary)
    ]
    index.write_text(json.dumps(content))
    code = worker.read_text()
    for line, replacement in RANKING.items():
        code = code.replace(line, replacement)
    worker.write_text(code)
