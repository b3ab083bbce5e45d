"""Each collective as the lab tells of it, with the lab's pictures of real tensors."""

from __future__ import annotations

from jobs.lab.words import EXAMPLE_BYTES, PRIMITIVES, Words
from manual.reference.words import code, plain, table

HEAD = f"""# The collectives

What ranks can do together, as the [lab](lab.md) runs, times, counts and checks it: open **Lab** on a board, and the
same pictures are drawn from tensors of your own hosts. These are of four ranks of one machine: what each held before,
and after. Element i of rank r starts as 100 (r + 1) + i, so that a value tells where it came from.

n is the ranks of the group, S the bytes of the full (gathered) buffer, α seconds a message, B bytes a second of a link.
Times are a ring's; bytes are those of an algorithm at its best, in the tables for S = {EXAMPLE_BYTES:,}. Which strategy
needs which: [the strategies](strategies.md).
"""  # noqa: RUF001 - as the field writes it


def page() -> str:
    return "\n".join([HEAD, *(_section(words) for words in PRIMITIVES)])


def _section(words: Words) -> str:
    parts = [f"## {words.title}\n", plain(words.meaning) + "\n"]
    parts.append(f"![{words.title}: what four ranks hold before and after](../pictures/lab-{words.slug}.png)\n")
    parts.append(f"```python\n{words.call}\n```\n")
    rows = [["time", code(words.time)], ["a rank sends", f"{code(words.sent)} bytes"]]
    rows += [[f"on {n} ranks", f"{sent:,} bytes"] for n, sent in words.examples if words.name != "barrier"]
    parts.append(table(["what", "cost"], rows))
    parts += [f"- **{use.strategy}**: {plain(use.words)}" for use in words.uses]
    return "\n".join(parts) + "\n"
