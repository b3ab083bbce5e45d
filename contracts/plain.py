"""Other people's words, without what a terminal or a reader of JSON would obey."""

from __future__ import annotations

import re

# CSI, then OSC and its like up to their end, then two-byte escapes.
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b.?|\x9b[0-?]*[ -/]*[@-~]")
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# Overrides, embeddings, isolates. Marks of direction, and what joins letters and emoji, stay: languages need them.
TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def upright(text: str) -> str:
    """What would turn the direction of the text after it stands there as it is written."""
    return TURNS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plain_line(text: str) -> str:
    """A line without colours and control characters; tabs stay."""
    return CONTROLS.sub("", ESCAPES.sub("", text))
