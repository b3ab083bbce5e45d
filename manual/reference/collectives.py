"""Page of all collectives, with pictures of captured tensors."""

from __future__ import annotations

from jobs.runs.collectives.descriptions import EXAMPLE_BYTES, PRIMITIVES, CollectiveDescription
from manual.reference.markdown import escape_markdown, format_code, format_table

HEAD = f"""# Collectives

This page describes each collective with its PyTorch call, its cost, and its uses. The page **Collectives** of a board
[benchmarks](lab.md) them on your hosts. See [strategies](strategies.md) for the collectives of each axis.

The pictures show the tensors of four ranks before and after a call. Element i of rank r starts as 100 (r + 1) + i, so
each value shows its rank.

| symbol | meaning |
|---|---|
| n | ranks of the group |
| S | bytes of the full (gathered) buffer, {EXAMPLE_BYTES:,} in the tables |
| α | latency per message, in seconds |
| B | bandwidth of a link, in bytes per second |

Times are for a ring. Bytes are for a bandwidth-optimal algorithm.
"""  # noqa: RUF001 - mathematical signs


def build_page() -> str:
    """Return the Markdown of the page."""
    return "\n".join([HEAD, *(_section(words) for words in PRIMITIVES)])


def _section(words: CollectiveDescription) -> str:
    parts = [f"## {words.title}\n", escape_markdown(words.meaning) + "\n"]
    parts.append(f"![{words.title}: tensors of four ranks before and after](../pictures/lab-{words.slug}.png)\n")
    parts.append(f"```python\n{words.call}\n```\n")
    rows = [["time", format_code(words.time)], ["bytes per rank", format_code(words.sent)]]
    rows += [[f"bytes per rank, {n} ranks", f"{sent:,}"] for n, sent in words.examples if words.name != "barrier"]
    parts.append(format_table(["quantity", "cost"], rows))
    parts += [f"- **{use.strategy}**: {escape_markdown(use.words)}" for use in words.uses]
    return "\n".join(parts) + "\n"
