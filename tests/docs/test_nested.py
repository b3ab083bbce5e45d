"""Code and tables inside list items are blocks of their item on the site, as they are on GitHub."""

from __future__ import annotations

import re

from markdown import markdown

from manual.markdown import indent_nested_blocks

STEPS = """1. Install:
   ```
   pip install \\
     meshboard
   ```
   Then log in.
2. Choose a command:

   | installation | command |
   |---|---|
   | `make up` | `make` |

   Start it.
   - one
   - two
3. Look.

```
1. not a list
   ```
"""


def html() -> str:
    return markdown(indent_nested_blocks(STEPS), extensions=["tables", "fenced_code", "sane_lists"], tab_length=4)


def test_keeps_code_and_numbering_in_steps() -> None:
    assert html().count("<ol>") == 1
    steps = re.search(r"<ol>(.*)</ol>", html(), re.S)
    assert steps
    assert "<pre><code>pip install \\\n  meshboard\n</code></pre>" in steps[1]
    assert "<p>Then log in.</p>" in steps[1]


def test_keeps_tables_and_lists_in_steps() -> None:
    assert re.search(
        r"Choose a command:.*<table>.*</table>.*Start it\..*<ul>\s*<li>one</li>.*<li>.*Look\.", html(), re.S
    )
    assert "|" not in re.sub(r"<pre>.*?</pre>", "", html(), flags=re.S)


def test_keeps_code_outside_lists() -> None:
    text = "a\n\n```\n1. not a list\n   three spaces\n```\n"
    assert indent_nested_blocks(text) == text
