"""Build the documentation site in docs/site, which the web server serves at /docs (`make docs`)."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from mkdocs.exceptions import Abort

from manual.build import SITE, build_site


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m manual", description=__doc__)
    parser.add_argument("--into", type=Path, default=SITE, help="output folder, which is replaced (default: docs/site)")
    into = parser.parse_args().into.resolve()
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    try:
        pages = build_site(into)
    except Abort as error:
        print(f"docs: {error}. {into} is unchanged.", file=sys.stderr)
        return 1
    print(f"{pages} pages in {into}. The board serves them at /docs.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
