"""Take pictures of every page at two widths in both themes into var/screens, and check the pages.

    python -m tests.screens [--up var/up.json] [--only WORD]

Without `--up`, the command starts a board with real jobs. With `--up`, it uses the newest jobs of a running board.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from pathlib import Path

from tests.screens.look import SIZES, THEMES, Look, Visitor
from tests.screens.pages import Shown, pages
from tests.screens.world import a_board
from tests.support.browser import run_chromium

ROOM = Path("var/screens")
Seen = dict[str, dict[str, Look]]  # by page, by window


def main() -> int:
    requests = argparse.ArgumentParser(prog="python -m tests.screens", description=__doc__.partition("\n")[0])
    requests.add_argument("--up", type=Path, help="of a board that runs")
    requests.add_argument("--only", default="", help="pages with this in their name")
    requests.add_argument("--windows", default="", help="sizes and themes with this in their name")
    shown = requests.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    ROOM.mkdir(parents=True, exist_ok=True)
    with a_board(shown.up) as (made, world):
        wanted = [page for page in pages(world) if shown.only in page.name]
        seen = look_at(made.url, made.login, wanted, shown.windows, ROOM)
    return report(seen, ROOM)


def report(seen: Seen, room: Path) -> int:
    """Print the faults, and return the exit status."""
    (room / "index.html").write_text(index(seen))
    bad = {(page, window): look.faults for page, by in seen.items() for window, look in by.items() if look.faults}
    for (page, window), faults in sorted(bad.items()):
        print(f"{page} ({window})")
        for fault in faults:
            print(f"  {fault}")
    total = sum(len(by) for by in seen.values())
    print(f"{room / 'index.html'}: {len(seen)} pages")
    print(f"{total - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0


def look_at(url: str, login: tuple[str, str], wanted: list[Shown], windows: str, room: Path) -> Seen:
    """Visit every page in every window, and save the pictures in `room`."""
    seen: Seen = {}
    with run_chromium() as browser:
        for window, size, theme in ((f"{s}-{t}", size, t) for s, size in SIZES.items() for t in THEMES):
            if windows not in window:
                continue
            visitor = Visitor(browser, url, login, size, theme)
            for page in wanted:
                look = visitor.look(page, room / f"{page.name}-{window}.png")
                if look is not None:
                    seen.setdefault(page.name, {})[window] = look
            visitor.close()
    return seen


def index(seen: Seen) -> str:
    """Write a page with all pictures."""
    rows = []
    for page, by in seen.items():
        cells = "".join(
            f'<td><a href="{look.picture}"><img loading="lazy" width="300" src="{look.picture}" alt="{window}"></a>'
            f"<p>{window}</p><ul>{''.join(f'<li>{html.escape(fault)}</li>' for fault in look.faults)}</ul></td>"
            for window, look in by.items()
        )
        rows.append(f"<tr><th>{html.escape(page)}</th>{cells}</tr>")
    return f"<!doctype html><meta charset=utf-8><title>Screens</title><table>{''.join(rows)}</table>"


if __name__ == "__main__":
    sys.exit(main())
