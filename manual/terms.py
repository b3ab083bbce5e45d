"""Search entries for the terms of the glossary. A search for a term lists the meaning of the term first."""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE = "reference/glossary.md"
ADDRESS = "reference/glossary/"
BOOST = 20  # weight of a term's entry; other entries weigh 1
RANKING = {  # lines of mkdocs' search worker, and their replacements
    "this.field('title');": "this.field('title', { boost: 10 });",
    "this.add(doc);": "this.add(doc, { boost: doc.boost || 1 });",
}
ROW = re.compile(r"^\| (?!Term \|)([^|\n]+) \| ([^|\n]+) \|", re.M)


def anchor(term: str) -> str:
    """Return the id of a term in the glossary page."""
    return "term-" + re.sub(r"[^a-z0-9]+", "-", term.lower()).strip("-")


def add_anchors(markdown: str) -> str:
    """Return the text of the glossary with an anchor in each row."""
    return ROW.sub(lambda row: row[0].replace("| ", f'| <a id="{anchor(row[1])}"></a>', 1), markdown)


def add_to_search(folder: Path, glossary: str) -> None:
    """Add an entry per term to the search index, and let the search worker rank these entries first."""
    index, worker = folder / "search_index.json", folder / "worker.js"
    content = json.loads(index.read_text())
    content["docs"] += [
        {"location": f"{ADDRESS}#{anchor(term)}", "title": term, "text": meaning, "boost": BOOST}
        for term, meaning in ROW.findall(glossary)
    ]
    index.write_text(json.dumps(content))
    code = worker.read_text()
    for line, replacement in RANKING.items():
        code = code.replace(line, replacement)
    worker.write_text(code)
