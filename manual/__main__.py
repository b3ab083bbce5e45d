"""`make docs`: docs/ and the generated reference as a site in docs/site, which the web tier serves under /docs."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from mkdocs.exceptions import Abort

from manual.build import SITE, build


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m manual", description=__doc__)
    asked.add_argument("--into", type=Path, default=SITE, help="output folder, which is replaced (default: docs/site)")
    into = asked.parse_args().into.resolve()
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        pages = build(into)
    except Abort as error:
        print(f"docs: {error}. {into} is unchanged.", file=sys.stderr)
        return 1
    print(f"{pages} pages in {into}. The board serves them at /docs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
